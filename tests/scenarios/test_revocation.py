"""A device is revoked in the middle of a run: the others go on without it, and nobody listens to it any more."""

import time

import pytest

from fleet.admission import Registrar
from tests.helpers.fleets import Wiretap, make_fleet, uploads_of
from wire.loopback import LoopbackTransport


def publish(fleet):
    """Let the owner connect and leave what is new."""
    transport = LoopbackTransport(fleet.broker, "owner", lambda _event: None)
    registrar = Registrar(fleet.stage.fleet, transport)
    registrar.start(int(time.time()))
    transport.start()
    registrar.publish_roster()
    registrar.publish_keys()
    fleet.broker.pump()


@pytest.mark.parametrize("restart", [False, True], ids=["at once", "while the aggregator is away"])
def test_a_run_goes_on_without_a_revoked_device(tmp_path, restart, caplog):
    """No round waits for its deadline, no order goes to it, its upload is refused; the run keeps its own keys."""
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", faults=tap, count=4, rounds=4, quorum=1.0) as fleet:
        fleet.run_until(lambda: len(fleet.records()) >= 1, 10)
        if restart:
            fleet.kill_aggregator()
        key = fleet.stage.fleet.secrets.broadcast_key
        fleet.stage.fleet.revoke("dev-03")
        publish(fleet)
        if restart:
            fleet.revive_aggregator()
        sent = len(uploads_of(fleet, tap, "dev-03"))
        started_s = fleet.now_s
        records = fleet.run(60)
        assert fleet.now_s - started_s < fleet.plan.deadline_s / 2
        assert records[-1]["final"]
        assert "dev-03" not in records[-1]["norms"]
        assert [r["ordered"] for r in records[2:]] == [3] * len(records[2:])
        assert len(uploads_of(fleet, tap, "dev-03")) <= sent + 1
        assert fleet.service.status() is not None
        device = fleet.devices["dev-00"].runtime._membership
        assert device.roster.revoked == ("dev-03",)
        assert device.grant.broadcast_key == key
        assert device.next.broadcast_key == fleet.stage.fleet.secrets.broadcast_key != key


def test_a_recorded_roster_and_recorded_keys_bring_nobody_back(tmp_path, caplog):
    """The broker plays back what lay there before the revocation."""
    with make_fleet(tmp_path / "fleet", count=3, rounds=2) as fleet:
        fleet.stage.fleet.renew()
        publish(fleet)
        fleet.settle()
        topics = [t for t in fleet.broker.retained if "/o/roster" in t or "/s/keys/" in t]
        recorded = {t: fleet.broker.retained[t] for t in topics}
        assert len(recorded) == 5
        fleet.stage.fleet.revoke("dev-02")
        publish(fleet)
        fleet.settle()
        caplog.clear()
        from wire.transport import Message

        for topic, payload in recorded.items():
            fleet.broker.submit("attacker", Message(topic, payload, retained=True), lambda: None)
        fleet.settle()
        assert "refused as a rollback" in caplog.text or any(
            "rollback" in str(getattr(r, "kv", "")) for r in caplog.records
        )
        assert fleet.service._membership.roster.revoked == ("dev-02",)
        member = fleet.devices["dev-00"].runtime._membership
        assert member.generation(member.next) == fleet.stage.fleet.roster.keys_since
