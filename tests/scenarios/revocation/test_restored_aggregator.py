"""The aggregator's directory is lost in the middle of a run and restored from a backup, which may be older than the fleet."""

import shutil

import pytest
from shoal_lab.loopback.fleet import draw_origins

from aggregator.membership import AggregatorMembership
from aggregator.rounds.state import Order
from aggregator.storage.backup import restore, save
from edge_client.membership import DeviceMembership
from shoal.errors import ShoalError, UntrustedError
from shoal.protocol import channels
from shoal.protocol.recipe import Recipe
from tests.helpers.fleets import FULL_BATCH, make_fleet, names, publish
from tests.helpers.sessions import hand_over

ASLEEP = "dev-02"


@pytest.fixture
def fleet(tmp_path):
    """Five devices in round 2 of a long run, and a backup of the aggregator from before its first round."""
    with make_fleet(tmp_path / "fleet", count=5, rounds=50, shards=1, quorum=0.5, min_contributors=3) as made:
        save(made.stage.aggregator_dir, tmp_path / "file")
        made.run_until(lambda: made.closed() >= 2, 60)
        yield made


def lose_and_restore(fleet, tmp_path):
    fleet.kill_aggregator()
    shutil.rmtree(fleet.stage.aggregator_dir)
    restore(tmp_path / "file", fleet.stage.aggregator_dir)


def next_run(fleet):
    chosen = Recipe("fedavg", rounds=2, local=FULL_BATCH, seed=2, min_contributors=1, quorum=0.5)
    fleet.plan = fleet.stage.add_run(fleet.bundle, draw_origins(fleet.bundle.manifest, 1, 7), chosen)
    fleet.revive_aggregator()


def test_the_fleet_goes_on_with_the_next_run(fleet, tmp_path):
    """A device was revoked and secrets were drawn since the backup; another was off for the whole change."""
    fleet.kill_device(ASLEEP)
    fleet.stage.fleet.revoke("dev-04")
    publish(fleet)
    fleet.run_until(lambda: fleet.closed() >= 5, 400)
    first, newest = fleet.plan.run, fleet.stage.fleet.roster
    lose_and_restore(fleet, tmp_path)
    next_run(fleet)  # its loop takes the owner's newest roster and keys from the broker
    fleet.run_until(lambda: fleet.closed() >= 1, 400)
    assert fleet.service._membership.roster == newest
    fleet.revive_device(ASLEEP)
    fleet.run(600)
    assert fleet.plan.run > first
    left = [name for name in names(5) if name != "dev-04"]
    assert {DeviceMembership(fleet.stage.device_dir(name)).roster.sequence for name in left} == {newest.sequence}
    assert len({fleet.model(name).theta.tobytes() for name in left if name != ASLEEP}) == 1
    assert all("dev-04" not in record["norms"] for record in fleet.records())


def test_lost_run_again_blames_the_server(fleet, tmp_path, caplog):
    """The owner, or who has recorded the request, sends the old run again: no device computes a round twice."""
    package = next((fleet.stage.aggregator_dir / "runs").glob("*.run")).read_bytes()
    lose_and_restore(fleet, tmp_path)
    (fleet.stage.aggregator_dir / "runs" / "000001.run").write_bytes(package)
    fleet.revive_aggregator()
    fleet.run_until(lambda: fleet.service.odd, 400)
    facts = fleet.service.facts()
    assert "have signed another history of run 1 than this aggregator has" in facts.shortage
    assert "backup" in facts.advice
    assert not any(name in facts.shortage + facts.advice for name in names(5))
    assert facts.waiting == facts.not_waited_for == ()
    assert fleet.closed() == 0
    assert "odd one" in caplog.text
    fleet.service.obey(Order.STOP_NOW, fleet.now_s)  # the daemon drops it then: no device would end it
    fleet.run_until(lambda: fleet.now_s > 500, 600)
    assert fleet.service.odd
    assert not fleet.service.finished
    assert fleet.closed() == 0


def test_devices_refuse_the_old_roster(fleet, tmp_path):
    """The broker has lost the owner's newest one, so that the restored aggregator publishes its own."""
    fleet.stage.fleet.revoke("dev-04")
    publish(fleet)
    fleet.run_until(lambda: fleet.closed() >= 5, 400)
    newest = fleet.stage.fleet.roster
    lose_and_restore(fleet, tmp_path)
    old = AggregatorMembership(fleet.stage.aggregator_dir).roster_bytes
    runtime = fleet.devices["dev-00"].runtime
    with pytest.raises(UntrustedError, match="refused as a rollback"):
        runtime._membership.adopt(old)
    with pytest.raises(ShoalError):
        hand_over(runtime, channels.ROSTER, old)
    assert runtime._membership.roster == newest
    assert "dev-04" in DeviceMembership(fleet.stage.device_dir("dev-00")).roster.revoked
