"""A device's disk fills up at different moments of a run: the round that it is asked for is declined, then it ends."""

import pytest
from shoal_lab.loopback.fleet import BROKER_URL

from edge_client.protocol.session import ANNOUNCED_WITHIN_S
from shoal.errors import StorageError
from shoal.simulation.process_fleet import Stage
from tests.helpers.disks import fill, small_disk
from tests.helpers.fleets import make_fleet, names

FULL = "dev-02"
OPTIONS = {"count": 4, "rounds": 50, "quorum": 0.7, "deadline_s": 1000.0}


@pytest.fixture
def scene(tmp_path, tap):
    """Yield (fleet, the directory of dev-02, which has a disk of its own)."""
    place = tmp_path / "fleet" / "devices" / FULL
    with small_disk(place):
        stage = Stage(tmp_path / "fleet", BROKER_URL, names(OPTIONS["count"]))
        with make_fleet(tmp_path / "fleet", faults=tap, stage=stage, **OPTIONS) as fleet:
            yield fleet, place


def run_until_it_ends(fleet):
    with pytest.raises(StorageError, match="No space left on device"):
        fleet.run_until(lambda: False, 60)
    fleet.kill_device(FULL)


def test_a_run_s_package_does_not_fit(scene):
    """Nothing is followed yet; package and announcement may come in either order."""
    fleet, place = scene
    fill(place)
    run_until_it_ends(fleet)
    fleet.run_until(lambda: fleet.records(), 60)
    assert fleet.records()[0]["declined"] == {FULL: "disk"}
    assert fleet.now_s < 60


def test_it_fills_up_during_the_run(scene):
    """Files overwritten in place still fit; the states of the next round do not."""
    fleet, place = scene
    fleet.run_until(lambda: fleet.closed() >= 2, 60)
    fill(place)
    began = len(fleet.records()) + 1
    run_until_it_ends(fleet)
    declined = [(r["round"], r["declined"]) for r in fleet.run(60) if r["declined"]]
    assert declined in ([(began, {FULL: "disk"})], [(began + 1, {FULL: "disk"})])


@pytest.fixture
def answered(scene, tap):
    """Return (fleet, forgive) when dev-02 has answered a round that waits for dev-01, and its disk has failed since."""
    fleet, place = scene
    fleet.run_until(lambda: fleet.closed() >= 2, 60)
    hold = tap.lose(client=fleet.client_id("dev-01"), ending="/up")
    device = fleet.devices[FULL].runtime
    fleet.run_until(lambda: fleet.service.status().endswith("3 of 4, waiting for dev-01"), 60)
    fill(place)
    with device._stopping_on_disk_errors():  # in place of the next write
        device._files.save_status({"stage": "idle"})
    return fleet, lambda: tap.forgive(hold)


def test_it_fails_between_two_rounds(answered):
    """The open round has the device's upload, so that the next one is declined."""
    fleet, forgive = answered
    forgive()
    run_until_it_ends(fleet)
    closed = len(fleet.records())
    fleet.run_until(lambda: fleet.closed() > closed, 60)
    assert fleet.records()[closed]["declined"] == {FULL: "disk"}
    assert FULL in fleet.records()[closed - 1]["norms"]


def test_it_fails_while_no_round_comes(answered):
    """It ends after a while all the same."""
    fleet, _ = answered
    began_s = fleet.now_s
    run_until_it_ends(fleet)
    assert ANNOUNCED_WITHIN_S <= fleet.now_s - began_s < 2 * ANNOUNCED_WITHIN_S
