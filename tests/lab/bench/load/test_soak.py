"""Soaks: first and last third compared, samples at equal intervals, and an error if rounds stop."""

import types

import pytest
from shoal_lab.bench.load import soak
from shoal_lab.bench.load.fleet_load import STALLED_S
from shoal_lab.bench.load.soak import RISE_MOST, SLACK, figures, is_flat

from shoal.simulation.process_fleet import StageError
from tests.lab.bench.load.loads import sample


@pytest.mark.parametrize(("growth", "flat"), [(0, True), (3_500, True), (200_000, False), (1_000_000, False)])
def test_a_database_that_grows_is_not_flat(growth, flat):
    """35 bytes a round are the run's record; more would be client updates that nothing deletes."""
    found = figures(
        [sample(60.0 * n, 100 * n, database_bytes=200_000 + growth * n, aggregator_cpu_s=0.5 * n) for n in range(12)]
    )
    assert found["flat"] == dict.fromkeys(SLACK, True) | {"database_bytes": flat}
    assert found["first_third"]["seconds_per_round"] == pytest.approx(0.6)
    assert found["last_third"]["aggregator_cpu_s_per_round"] == pytest.approx(0.005)
    assert (found["rounds"], found["minutes"], len(found["samples"])) == (1100, 11.0, 12)


@pytest.mark.parametrize(("count", "ends"), [(9, (1.0, 7.0)), (4, (0.5, 2.5))])
def test_thirds_have_two_samples_at_least(count, ends):
    """They leave out the middle; one without a closed round divides by one."""
    found = figures([sample(float(n), 5, rss_mb=n) for n in range(count)])
    thirds = found["first_third"], found["last_third"]
    assert tuple(third["rss_mb"] for third in thirds) == ends
    assert thirds[1]["seconds_per_round"] == max(2, count // 3) - 1


@pytest.mark.parametrize("name", SLACK)
def test_figure_may_rise_by_a_tenth(name):
    """A figure may rise by a tenth and its slack."""
    most = 60.0 * (1.0 + RISE_MOST) + SLACK[name]
    assert is_flat(name, 60.0, most)
    assert is_flat(name, 60.0, 0.0), "less is as good"
    assert not is_flat(name, 60.0, most * 1.001)


class Fleet:
    """A load fleet in virtual time, whose aggregator closes two rounds a second until ``stops_s``."""

    model_bytes = 400
    first_s, stops_s = 3.0, float("inf")

    def __init__(self, clock, **options):
        self.clock, self.options, self.log = clock, options, []
        self.algorithm, self.programs = (
            "fedavg",
            {"aggregator": types.SimpleNamespace(tail=lambda: "the end of the log")},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.log.append("closed")

    def start_aggregator(self):
        self.log.append("aggregator")

    def start_drivers(self):
        self.log.append("drivers")

    def sample(self, at_s):
        closed = int(max(0.0, 2.0 * (min(self.clock.now_s, self.stops_s) - self.first_s)))
        return sample(at_s, closed, aggregator_cpu_s=0.1 * closed)

    def reports(self):
        return [{"nacks": 1, "reminders": 2}, {"nacks": 3, "reminders": 4}]


@pytest.fixture
def fleet(monkeypatch):
    """Patch soak's clock and fleet; return the fleet that `measure` makes, with its class for changes."""
    clock, made = types.SimpleNamespace(now_s=0.0), []

    def sleep(seconds):
        clock.now_s += seconds

    monkeypatch.setattr(soak, "time", types.SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    monkeypatch.setattr(soak, "LoadFleet", lambda **options: made.append(Fleet(clock, **options)) or made[-1])
    return made


def test_soak_samples_from_warm_up_to_end(fleet):
    """A soak samples from its warm up to its end."""
    found = soak.measure(7, 1.0)
    assert fleet[0].log == ["aggregator", "drivers", "closed"]
    assert fleet[0].options == {"devices": 7, "rounds": soak.ROUNDS}
    times = [s["at_s"] for s in found["samples"]]
    assert times == pytest.approx(range(len(times))), "one a second"
    assert times[-2] < 60.0 <= times[-1]
    assert found["samples"][0]["closed"] == pytest.approx(2 * 6, abs=1), "a tenth of a minute after the first one"
    assert (found["nacks"], found["reminders"]) == (4, 6)
    assert found["rounds"] == pytest.approx(120, abs=2)


@pytest.mark.parametrize("changes", [{"first_s": 10**6}, {"stops_s": 30.0}])
def test_a_soak_whose_rounds_stop_ends(fleet, monkeypatch, changes):
    """With the aggregator's log."""
    for name, value in changes.items():
        monkeypatch.setattr(Fleet, name, value)
    with pytest.raises(StageError, match=f"no round closed for {STALLED_S:g} s\nthe end of the log"):
        soak.measure(7, 60.0)
    assert fleet[0].log[-1] == "closed", "no process outlives the error"
