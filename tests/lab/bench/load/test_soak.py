"""Soaks: first and last third compared, samples at equal intervals, and an error if rounds stop."""

import dataclasses
import types

import pytest
from shoal_lab.bench.load import soak
from shoal_lab.bench.load.driver import DriverReport
from shoal_lab.bench.load.fleet_load import STALLED_S, Sample
from shoal_lab.bench.load.soak import RISE_MOST, SLACK, SoakFigures, SoakSample, is_flat, thirds

from shoal.simulation.process_fleet import StageError


def soak_of(database_bytes):
    samples = [
        SoakSample(
            at_s=60.0 * n,
            closed=100 * n,
            rss_mb=60.0,
            open_files=20,
            database_bytes=database_bytes(n),
            aggregator_cpu_s=0.5 * n,
        )
        for n in range(12)
    ]
    return SoakFigures(
        devices=30, algorithm="fedavg", model_bytes=400, samples=tuple(samples), nacks=0, reminders=0
    ).data()


def test_a_database_that_grows_is_not_flat():
    flat, growing = soak_of(lambda _n: 200_000), soak_of(lambda n: 200_000 * (n + 1))
    assert flat["flat"] == dict.fromkeys(flat["flat"], True)
    assert [name for name, is_so in growing["flat"].items() if not is_so] == ["database_bytes"]
    assert flat["first_third"]["seconds_per_round"] == pytest.approx(0.6)
    assert flat["last_third"]["aggregator_cpu_s_per_round"] == pytest.approx(0.005)
    assert (flat["rounds"], flat["minutes"]) == (1100, 11.0)


def test_the_record_of_each_round_may_grow_the_database():
    """35 bytes a round are the run's record; 1,000 would be client updates that nothing deletes."""
    record, updates = (soak_of(lambda n, size=size: 2_000_000 + 100 * n * size)["flat"] for size in (35, 10_000))
    assert record["database_bytes"]
    assert not updates["database_bytes"]


@pytest.mark.parametrize("name", SLACK)
def test_a_figure_may_rise_by_a_tenth_and_its_slack(name):
    most = 60.0 * (1.0 + RISE_MOST) + SLACK[name]
    assert is_flat(name, 60.0, most)
    assert is_flat(name, 60.0, 0.0), "less is as good"
    assert not is_flat(name, 60.0, most * 1.001)


def test_thirds_leave_out_the_middle_and_have_two_samples_at_least():
    samples = [
        SoakSample(at_s=n, closed=10 * n, rss_mb=n, open_files=n, database_bytes=n, aggregator_cpu_s=0.0)
        for n in range(9)
    ]
    first, last = thirds(samples)
    assert (first["rss_mb"], last["rss_mb"]) == (1.0, 7.0)
    assert first["seconds_per_round"] == pytest.approx(0.1)
    first, last = thirds(samples[:4])
    assert (first["rss_mb"], last["rss_mb"]) == (0.5, 2.5)


def test_a_third_without_a_closed_round_divides_by_one():
    samples = [
        SoakSample(at_s=10.0 * n, closed=5, rss_mb=1, open_files=1, database_bytes=1, aggregator_cpu_s=float(n))
        for n in range(4)
    ]
    assert thirds(samples)[1]["seconds_per_round"] == 10.0
    assert thirds(samples)[1]["aggregator_cpu_s_per_round"] == 1.0


class Fleet:
    """A load fleet in virtual time, whose aggregator closes two rounds a second until ``stops_s``."""

    model_bytes = 400
    first_s, stops_s = 3.0, float("inf")

    def __init__(self, clock, run_dir, **options):
        self.clock, self.run_dir, self.options, self.log = clock, run_dir, options, []
        self.aggregator = types.SimpleNamespace(tail=lambda: "the end of the log")

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
        return Sample(
            at_s=at_s,
            closed=closed,
            aggregator_cpu_s=0.1 * closed,
            broker_cpu_s=0.0,
            rss_mb=50.0,
            rss_mb_max=50.0,
            open_files=9,
        )

    def reports(self):
        return [DriverReport(5, 1, 2, 0.1), DriverReport(5, 3, 4, 0.1)]


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    """Patch soak's clock and fleet; return the fleet that `measure` makes, with its class for changes."""
    clock = types.SimpleNamespace(now_s=0.0)
    made = []

    def sleep(seconds):
        clock.now_s += seconds

    def make(**options):
        made.append(Fleet(clock, tmp_path, **options))
        return made[-1]

    monkeypatch.setattr(soak, "time", types.SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    monkeypatch.setattr(soak, "LoadFleet", make)
    return made


def test_a_soak_begins_after_its_warm_up_and_samples_to_its_end(fleet, tmp_path):
    (tmp_path / soak.DATABASE).write_bytes(b"x" * 100)
    (tmp_path / f"{soak.DATABASE}-wal").write_bytes(b"x" * 20)
    found = soak.measure(7, 1.0, "cfl")
    assert fleet[0].log == ["aggregator", "drivers", "closed"]
    assert fleet[0].options == {"devices": 7, "algorithm": "cfl", "rounds": soak.ROUNDS}
    times = [s.at_s for s in found.samples]
    assert times == pytest.approx(range(len(times))), "one a second"
    assert times[-2] < 60.0 <= times[-1]
    assert found.samples[0].closed == pytest.approx(2 * 6, abs=1), "a tenth of a minute after the first closed round"
    assert {s.database_bytes for s in found.samples} == {120}
    assert (found.nacks, found.reminders) == (4, 6)
    assert found.data()["rounds"] == pytest.approx(120, abs=2)
    assert set(found.data()["samples"][0]) == {f.name for f in dataclasses.fields(SoakSample)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"first_s": 10**6}, "no round closed in"), ({"stops_s": 30.0}, "no round closed for")],
)
def test_a_soak_whose_rounds_stop_ends_with_the_aggregators_log(fleet, monkeypatch, changes, message):
    for name, value in changes.items():
        monkeypatch.setattr(Fleet, name, value)
    with pytest.raises(StageError, match=f"{message} {STALLED_S:g} s\nthe end of the log"):
        soak.measure(7, 60.0)
    assert fleet[0].log[-1] == "closed", "no process outlives the error"
