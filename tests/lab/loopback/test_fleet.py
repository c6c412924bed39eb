"""The loopback fleet's own contract: virtual time, kills and revivals, and the starting models that it draws."""

import numpy as np
import pytest
from shoal_lab.loopback.fleet import POLL_S, LoopbackError, draw_origins
from shoal_lab.loopback.transport import Hop

from edge_client.learning.data import Dataset
from shoal.errors import UsageError
from shoal.task.bundle import Parameter
from tests.helpers.fleets import Wiretap, grouped_data, make_fleet
from tests.helpers.tasks import manifest

LAYERS = (
    Parameter("w1", (20, 400), "cluster"),
    Parameter("b1", (20,), "cluster"),
    Parameter("conv", (30, 4, 3, 3), "cluster"),
    Parameter("b2", (30,), "cluster"),
)


def test_origins_are_within_the_fan_in():
    """400 inputs give a twentieth, four maps of 3x3 a sixth; a bias has the bound of the tensor before it."""
    task = manifest(parameters=LAYERS)
    (origin,) = draw_origins(task, 1, 3)
    at = 0
    for parameter, bound in zip(LAYERS, (1 / 20, 1 / 20, 1 / 6, 1 / 6), strict=True):
        part = origin[at : at + parameter.length]
        assert 0.8 * bound < np.abs(part).max() <= bound
        assert part.min() < 0 < part.max()
        at += parameter.length
    assert at == len(origin)
    assert origin.dtype == np.float32


def test_origins_follow_the_seed():
    """Origins differ and follow seed and number."""
    task = manifest()
    three = draw_origins(task, 3, 1)
    assert three.shape == (3, task.length)
    assert len({o.tobytes() for o in three}) == 3
    assert np.array_equal(three, draw_origins(task, 3, 1))
    assert not np.array_equal(three, draw_origins(task, 3, 2))
    assert not np.array_equal(three[0], draw_origins(task, 2, 1)[0])


def test_time_passes_if_nothing_is_due(tmp_path):
    """Time passes only when nothing is due."""
    with make_fleet(tmp_path) as fleet:
        assert fleet.now_s == 0
        fleet.settle()
        assert fleet.now_s == 0
        assert fleet.step() is False
        assert 0 < fleet.now_s <= POLL_S


def test_late_end_says_so(tmp_path):
    """Lost chunks of the only message that starts a round keep it open; a dead aggregator is named."""
    tap = Wiretap()
    with make_fleet(tmp_path, faults=tap) as fleet:
        tap.lose(ending="/up", hop=Hop.UP)
        with pytest.raises(LoopbackError, match="not there after 2 virtual seconds; "):
            fleet.run(2)
        assert not fleet.finished
        fleet.kill_aggregator()
        with pytest.raises(LoopbackError, match="not there after 1 virtual seconds; the aggregator is dead"):
            fleet.run_until(lambda: False, 1)


def test_condition_that_holds_takes_no_step(tmp_path):
    with make_fleet(tmp_path) as fleet:
        fleet.run_until(lambda: True, 0)
        assert fleet.now_s == 0
        assert fleet.records() == []


def test_no_program_starts_or_dies_twice(tmp_path):
    """No program is started or killed twice."""
    with make_fleet(tmp_path) as fleet:
        with pytest.raises(UsageError, match="dev-01 is alive"):
            fleet.revive_device("dev-01")
        with pytest.raises(UsageError, match="the aggregator is alive"):
            fleet.revive_aggregator()
        fleet.kill_aggregator()
        with pytest.raises(UsageError, match="the aggregator is dead"):
            fleet.kill_aggregator()
        assert not fleet.finished


def test_killed_programs_leave_and_return(tmp_path):
    """Killed programs leave the network and revived ones return."""
    with make_fleet(tmp_path) as fleet:
        fleet.settle()
        everyone = {fleet.client_id(n) for n in ("aggregator", "dev-00", "dev-01", "dev-02")}
        assert set(fleet.broker.connected()) == everyone
        fleet.kill_device("dev-01")
        fleet.kill_aggregator()
        assert set(fleet.broker.connected()) == everyone - {fleet.client_id("dev-01"), fleet.client_id("aggregator")}
        fleet.revive_aggregator()
        fleet.revive_device("dev-01")
        assert [r["final"] for r in fleet.run(600)] == [False, False, False, True]
        assert set(fleet.broker.connected()) == everyone


def test_joining_device_takes_part(tmp_path):
    """A device that joins during the run takes part."""
    with make_fleet(tmp_path) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 600)
        fleet.add_device("dev-09", grouped_data(1)["dev-00"])
        fleet.run(600)
        assert "dev-09" in fleet.stage.devices
        assert fleet.model("dev-09").theta.shape == (fleet.bundle.length,)


def test_unfit_samples_are_the_devices_own(tmp_path):
    """It declines every round and gets no model; the others finish."""
    with make_fleet(tmp_path, deadline_s=5.0, quorum=0.6) as fleet:
        fleet.kill_device("dev-02")
        fleet.revive_device("dev-02", Dataset(np.zeros((5, 2), np.float32), np.zeros(5, np.int64)))
        records = fleet.run(600)
        assert records[-1]["final"]
        assert [(r["missing"], set(r["declined"])) for r in records] == [(["dev-02"], {"dev-02"})] * 4


def test_closing_twice_is_harmless(tmp_path):
    """Closing twice is harmless and keeps the directories."""
    with make_fleet(tmp_path) as fleet:
        fleet.run(600)
        records = fleet.records()
        fleet.close()
    assert fleet.devices == {}
    assert fleet.records() == records != []
