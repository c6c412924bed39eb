"""Which facts of a directory the record is built from."""

import pytest

from aggregator.rounds.state import Order
from aggregator.status.live_file import LiveFile
from aggregator.status.record import StoredRun
from aggregator.status.stored import fleet_status, stored_run
from aggregator.status.watch import FleetWatch
from shoal.transport.base import Connected
from shoal.util.files import exclusive, free_bytes_of
from tests.helpers.parties import Parties
from tests.helpers.plans import run_plan
from tests.unit.aggregator.status.test_live_file import RUN

RUNS = tuple(StoredRun(run=n, algorithm="fedavg", rounds=3, finished=n < 2) for n in (1, 2, 3))


@pytest.fixture
def server(tmp_path):
    return Parties(tmp_path, "dev-1", "dev-2").server


def record(round_, **changes):
    plain = {"round": round_, "final": False, "clusters": {}, "device_accuracy": {}, "cluster_losses": {}}
    return plain | changes


def test_figures_are_the_newest():
    """Figures of a run are the newest that there are."""
    plan = run_plan(rounds=9)
    found = stored_run(
        plan,
        [
            record(1, clusters={"dev-1": 0}, device_accuracy={"dev-1": [3, 4]}, cluster_losses={"0": 0.9}),
            record(2, clusters={"dev-1": 5}, cluster_losses={"5": 0.5}),
            record(3),
        ],
    )
    assert (found.run, found.rounds, found.closed, found.finished) == (plan.run, 9, 3, False)
    assert (found.clusters, found.tests, found.losses) == ({"dev-1": 5}, {"dev-1": [3, 4]}, {})
    assert stored_run(plan, [record(1, cluster_losses={"5": 0.5})]).losses == {5: 0.5}
    assert stored_run(plan, []).closed == 0


def test_earlier_records_have_no_losses():
    """Records of an earlier version have no losses."""
    old = record(1)
    del old["cluster_losses"]
    assert stored_run(run_plan(), [old]).losses == {}


def test_served_run_or_the_next_or_the_last(server):
    """The run is the one that is served or the next or the last."""
    assert fleet_status(server, RUNS).run.run == 2
    assert fleet_status(server, RUNS[:1]).run.run == 1
    assert fleet_status(server, ()).run is None
    LiveFile(server.directory, FleetWatch("mqtt://reef:1883")).keep_up(lambda: RUN, 0.0)
    assert fleet_status(server, RUNS).run.run == 2, "nothing is served while nothing runs"
    with exclusive(server.directory, wait_s=0, hint=""):
        assert fleet_status(server, RUNS).run.run == RUN.run == 1


def test_lock_says_that_the_daemon_runs(server):
    """A lock and not a file says that the daemon runs."""
    watch = FleetWatch("mqtt://reef:1883")
    watch.connection.on_event(Connected(session_present=False))
    LiveFile(server.directory, watch).keep_up(lambda: RUN, 0.0)
    dead = fleet_status(server, RUNS)
    assert (dead.running, dead.connected) == (False, False)
    with exclusive(server.directory, wait_s=0, hint=""):
        alive = fleet_status(server, RUNS)
    assert (alive.running, alive.connected, alive.run.phase) == (True, True, "round")


def test_revoked_devices_are_listed_last(tmp_path):
    parties = Parties(tmp_path, "dev-1", "dev-2")
    parties.owner.revoke("dev-1")
    parties.server.adopt(parties.owner.roster_bytes)
    found = fleet_status(parties.server, ())
    assert [(d.name, d.reason) for d in found.devices] == [("dev-2", ""), ("dev-1", "revoked by the owner")]


def test_gone_directory_has_no_space(tmp_path):
    """A directory that is gone has no free space to report."""
    assert free_bytes_of(tmp_path) > 0
    assert free_bytes_of(tmp_path / "gone") is None


def test_stopped_run_has_its_last_round():
    """A stopped run has its last round of training and the owners order."""
    found = stored_run(run_plan(rounds=9), [record(1), record(2), record(10, final=True)], Order.STOP)
    assert (found.closed, found.finished, found.order) == (2, True, "stopped by the owner")
    void = stored_run(run_plan(rounds=9), [], Order.STOP, void=True)
    assert (void.closed, void.finished) == (0, True)
