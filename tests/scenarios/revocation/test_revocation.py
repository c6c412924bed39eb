"""A device is revoked in the middle of a run: the others continue without it, and all its messages are refused."""

import pytest
from shoal_lab.loopback.fleet import LoopbackError
from shoal_lab.loopback.transport import Hop

from aggregator.membership import AggregatorMembership
from crypto.mask.derivation import key_id
from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head
from edge_client.membership import DeviceMembership
from shoal.errors import NotEnrolledError
from shoal.protocol.reassembly import Reassembler
from shoal.transport.base import Message
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    aggregator_identity,
    grouped_data,
    make_fleet,
    names,
    open_upload,
    restart_aggregator,
    same_partition,
    truth_of,
    uploads_of,
)
from tests.scenarios.faults import FaultRule, RuledFaults
from tests.scenarios.round_fleets import relayed_steps, round_masks


def broadcasts(passages):
    """Return (purpose, sealed) of every whole message to the fleet among ``passages``, in order."""
    chunks = Reassembler()
    found = []
    for p in passages:
        if "/s/" in p.topic and p.payload and p.hop is Hop.UP:
            transfer = chunks.add(p.topic.rpartition("/")[0] if p.topic[-1].isdigit() else p.topic, p.payload, 0.0)
            if transfer is not None:
                found.append(bytes(transfer.payload))
    return found


def readable(fleet, name, sealed):
    """Whether the keys in a device's directory open a message of the aggregator to the fleet."""
    member = DeviceMembership(fleet.stage.device_dir(name))
    head, at = read_head(sealed)
    key = aggregator_identity(fleet).member.sign_key
    for grant in (member.grant, member.next):
        if grant is not None:
            try:
                open_from_group(GroupKey(fleet.plan.fleet, "broadcast", grant.broadcast_key), sealed, head, at, key)
            except SealError:
                continue
            return True
    return False


@pytest.mark.parametrize("restart", [False, True], ids=["at once", "while the aggregator is away"])
@pytest.mark.parametrize("change", ["revoke", "rotate"])
def test_next_round_is_under_fresh_secrets(tmp_path, restart, change, caplog, tap):
    """The open round closes, and the next announcement is under new keys; the revoked device can neither read nor send."""
    with make_fleet(tmp_path / "fleet", faults=tap, count=4, rounds=5, quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 10)
        if restart:
            fleet.kill_aggregator()
        owner, before = fleet.stage.fleet, fleet.stage.fleet.secrets
        owner.revoke("dev-03") if change == "revoke" else owner.rotate()
        fleet.publish()
        if restart:
            fleet.revive_aggregator()
        sent, started_s = len(uploads_of(fleet, tap, "dev-03")), fleet.now_s
        version = owner.roster.keys_since
        fleet.run_until(lambda: fleet.service.state.held.key_version == version, 60)
        done, later = len(fleet.records()), len(tap.heard)
        records = fleet.run(60)
        assert fleet.now_s - started_s < fleet.plan.recipe.deadline_s / 2
        assert records[-1]["final"]
        assert done <= 2, "at most the round that was open has closed since"
        assert [r["round"] for r in records] == [1, 2, 3, 4, 5, 6], "the fleet takes no step of its own for it"
        assert [e["kind"] for r in records for e in r["events"]] == []
        remaining = [n for n in names(4) if change == "rotate" or n != "dev-03"]
        assert all(set(r["norms"]) == set(remaining) for r in records[done:-1])
        assert len({fleet.model(name).theta.tobytes() for name in remaining}) == 1
        uploads = [open_upload(fleet, "dev-00", sealed)[0] for sealed in uploads_of(fleet, tap, "dev-00")]
        assert {u.key_version for u in uploads if u.round > done} == {version}
        after = broadcasts(tap.heard[later:])
        assert len(after) >= 3
        assert all(readable(fleet, "dev-00", m) for m in after)
        stays = DeviceMembership(fleet.stage.device_dir("dev-00"))
        assert stays.version_key(version).number == version
        assert AggregatorMembership(fleet.stage.aggregator_dir).grant.broadcast_key == owner.secrets.broadcast_key
        assert owner.secrets.broadcast_key != before.broadcast_key
        if change == "revoke":
            assert not any(readable(fleet, "dev-03", m) for m in after)
            assert "dev-03" in records[0]["clusters"]
            assert len(uploads_of(fleet, tap, "dev-03")) <= sent + 1
            with pytest.raises(NotEnrolledError):
                DeviceMembership(fleet.stage.device_dir("dev-03")).version_key(version)
        gone = [name for name, device in fleet.devices.items() if device.runtime.revoked]
        assert gone == (["dev-03"] if change == "revoke" else [])
        refused = [r for r in caplog.records if r.getMessage() == "refused" and r.name == "shoal.edge"]
        assert refused == [], "nobody listens to what it can't read any more"


def test_revoked_device_opens_no_later_round(tmp_path, tap):
    """It has the whole recording and every key that it was ever given; the keys of the round before open nothing."""
    with make_fleet(tmp_path / "fleet", faults=tap, count=4, rounds=6, quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 10)
        owner = fleet.stage.fleet
        thief = owner.version_key
        owner.revoke("dev-03")
        fleet.publish()
        fleet.run(60)
        steps = relayed_steps(fleet)
        assert [kept.step.round for kept in steps] == [5, 6]
        thief.skip_to_run(fleet.plan.run)
        chain = thief.begin_run(fleet.plan.run_id)
        found = [chain.take() for _ in range(8)]
        plan = fleet.plan
        ids = {key_id(k.mask, k.context_of(plan)) for k in found}
        assert not ids & {mean.key_id for kept in steps for mean in kept.means}
        assert {round_masks(fleet, kept.step.round)[""].key_id for kept in steps} == {
            mean.key_id for kept in steps for mean in kept.means
        }


@pytest.mark.parametrize(
    ("hidden", "waiting"),
    [
        (["o/roster"], "the roster that belongs to them has not arrived yet"),
        (["o/roster", "s/keys/aggregator"], "waits for a round under the newer keys: dev-00, dev-01, dev-02"),
    ],
    ids=["the roster", "roster and keys"],
)
def test_nobody_works_before_server_knows(tmp_path, hidden, waiting):
    """Its own new keys say so to it; and if it hides or misses those as well, the devices' new keys say so to them."""
    rules = [FaultRule(f"+/+/+/{topic}/#", hop=Hop.DOWN, drop=1.0) for topic in hidden]
    with make_fleet(
        tmp_path / "fleet", faults=RuledFaults(rules, seed=0), count=4, rounds=99, quorum=1.0, deadline_s=500.0
    ) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 10)
        fleet.stage.fleet.revoke("dev-03")
        fleet.publish()
        fleet.settle()
        closed = len(fleet.records())
        with pytest.raises(LoopbackError, match=waiting):
            fleet.run_until(lambda: fleet.closed() > closed, 60)
        assert fleet.service._membership.roster.revoked == ()
        told = [fleet.devices[f"dev-0{i}"].runtime._membership for i in range(3)]
        assert all(member.roster.revoked == () for member in told)
        assert {member.keys_since for member in told} == {fleet.stage.fleet.roster.keys_since}


def test_groups_outlive_a_revocation(tmp_path):
    """FedGroup keeps nothing of earlier rounds that it would compare with updates under the new keys."""
    options = {"algorithm": "fedgroup", "settings": {"groups": "2", "alpha": "4"}, "rounds": 6}
    data = grouped_data(6, groups=2)
    with make_fleet(tmp_path / "fleet", data, quorum=0.6, **options) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 20)
        fleet.stage.fleet.revoke("dev-05")
        fleet.publish()
        records = fleet.run(60)
        assert same_partition(records[-1]["clusters"], {d: g for d, g in truth_of(6, 2).items() if d != "dev-05"})


def test_recordings_bring_nobody_back(tmp_path, caplog):
    """The broker replays the retained messages from before the revocation."""
    with make_fleet(tmp_path / "fleet", count=3, rounds=2) as fleet:
        fleet.stage.fleet.renew()
        fleet.publish()
        fleet.settle()
        topics = [t for t in fleet.broker.retained if "/o/roster" in t or "/s/keys/" in t]
        recorded = {t: fleet.broker.retained[t] for t in topics}
        assert len(recorded) == 5
        fleet.stage.fleet.revoke("dev-02")
        fleet.publish()
        fleet.settle()
        caplog.clear()
        for topic, payload in recorded.items():
            fleet.broker.submit("attacker", Message(topic, payload, retained=True), lambda: None)
        fleet.settle()
        assert "refused as a rollback" in caplog.text or any(
            "rollback" in str(getattr(r, "kv", "")) for r in caplog.records
        )
        assert fleet.service._membership.roster.revoked == ("dev-02",)
        assert fleet.devices["dev-00"].runtime._membership.newest_generation == fleet.stage.fleet.roster.keys_since


@pytest.mark.parametrize("killed", with_long([False, True], True))
@pytest.mark.parametrize("algorithm", with_long(["cfl", "ifca", "fedgroup"], "cfl"))
def test_a_revoked_device_leaves_its_cluster(tmp_path, algorithm, killed):
    """No record of a later round names it, also if the aggregator is killed in the round in which it is revoked."""
    options = {"cfl": {}, "ifca": {"settings": {"k": "2"}}, "fedgroup": {"settings": {"groups": "2", "alpha": "2"}}}[
        algorithm
    ]
    with make_fleet(
        tmp_path / "fleet", count=5, algorithm=algorithm, rounds=8, quorum=0.5, deadline_s=30.0, seed=3, **options
    ) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 3, 100)
        fleet.stage.fleet.revoke("dev-03")
        fleet.publish()
        fleet.run_until(lambda: "dev-03" not in fleet.service.state.devices, 100)
        if killed:
            restart_aggregator(fleet)
        at = len(fleet.records())
        records = fleet.run(300)
        # One round may be open.
        assert all("dev-03" not in record["clusters"] for record in records[at + 1 :])
        assert set(records[-1]["clusters"]) == {"dev-00", "dev-01", "dev-02", "dev-04"}
