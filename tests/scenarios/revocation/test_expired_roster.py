"""The owner's signature on the roster lasts a year: then a device waits for a newer one, and believes nothing else."""

import time

import pytest
from shoal_lab.loopback.fleet import LoopbackError

from shoal.owner.keys.directory import ROSTER_LIFE_S
from tests.helpers.fleets import make_fleet, thetas, uploads_of

NAMES = ("dev-00", "dev-01", "dev-02")


@pytest.fixture
def clock(monkeypatch):
    """The clock of every machine: ``clock(s)`` puts it forward."""
    real, ahead_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s[0])

    def forward(seconds):
        ahead_s[0] += seconds

    return forward


def test_devices_wait_for_a_newer_roster(tmp_path, clock, caplog, tap):
    """One is started again in between; no device follows an announcement or sends anything before the owner signs a new one."""
    with make_fleet(tmp_path / "fleet", faults=tap, rounds=5, quorum=1.0, deadline_s=2000.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 20)
        fleet.kill_device("dev-01")
        fleet.settle()
        clock(ROSTER_LIFE_S + 10)
        fleet.revive_device("dev-01")
        fleet.settle()
        before, sent = len(fleet.records()), [len(uploads_of(fleet, tap, name)) for name in NAMES]
        heard = len(tap.heard)
        with pytest.raises(LoopbackError):
            fleet.run_until(lambda: fleet.closed() > before, 100)
        assert [len(uploads_of(fleet, tap, name)) for name in NAMES] == sent
        assert not [
            p for p in tap.heard[heard:] if p.topic.endswith("/state") and p.client == fleet.client_id("dev-01")
        ]
        assert fleet.devices["dev-01"].runtime.following is None
        told = [r.kv for r in caplog.records if r.getMessage() == "the roster has expired: waiting for a newer one"]
        assert len(told) == len(NAMES), "each says it once"
        assert "clock" in told[0]["hint"]
        assert "shoal-fleet renew" in told[0]["hint"]
        fleet.stage.fleet.renew()
        fleet.publish()
        records = fleet.run(3000)
        assert set(records[-1]["clusters"]) == set(NAMES)
        assert len(set(thetas(fleet).values())) == 1


def test_a_clock_that_is_put_right_is_enough(tmp_path, clock):
    with make_fleet(tmp_path / "fleet", rounds=3, quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 20)
        fleet.kill_device("dev-01")
        clock(ROSTER_LIFE_S + 10)
        fleet.revive_device("dev-01")
        fleet.settle()
        assert fleet.devices["dev-01"].runtime.following is None
        clock(-ROSTER_LIFE_S)
        assert "dev-01" in fleet.run(1000)[-1]["clusters"]
