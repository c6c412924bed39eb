"""The load bench: limits on its fleet, the figures of a run, the reader of its page; soaks: thirds compared, and their end."""

import itertools
import time
import types

import pytest
from shoal_lab.bench.load import fleet_load, measurement
from shoal_lab.bench.load.fleet_load import STALLED_S
from shoal_lab.bench.load.measurement import RISE_MOST, SLACK, compared, figures, is_flat

from shoal.errors import ConfigError, UsageError
from shoal.simulation.process_fleet import StageError
from shoal.transport.local_broker import free_port
from tests.helpers import page_readers
from tests.helpers.loads import sample
from tests.helpers.pages import PagePlace, names
from tests.helpers.waiting import until


@pytest.mark.parametrize(
    ("devices", "error", "message"), [(1500, ConfigError, "1564 open files"), (70_000, UsageError, "65534")]
)
def test_fleet_that_is_too_large_is_refused(monkeypatch, devices, error, message):
    monkeypatch.setattr(fleet_load, "raise_open_files", lambda: 1024)
    with pytest.raises(error, match=message):
        fleet_load._check_open_files(devices)


class Fleet:
    """The sizes of a fleet; no process."""

    size, model_bytes, algorithm, rounds = 10, 400, "fedavg", 3
    churn = 0.0
    shards, core_each, keeper = 1, False, ""


def test_figures_leave_out_warm_up_and_final():
    """Figures leave out warm up and final round."""
    samples = [
        sample(0.0, n, aggregator_cpu_s=0.1 * n, broker_cpu_s=0.01 * n, rss_mb_max=50 + n, open_files=10 + n)
        for n in range(5)
    ]
    records = [
        {"round": n, "ordered": 10, "contributed": 10 - n // 4, "seconds": float(n), "out_of_step": {}}
        for n in (1, 2, 3, 4)
    ]
    data = figures(Fleet(), records, samples, [{"nacks": 1, "reminders": 2}, {"nacks": 0, "reminders": 3}])
    assert data["seconds_per_round_median"] == 2.5
    assert data["aggregator_cpu_ms_per_upload"] == pytest.approx(1e3 * 0.2 / 20)
    assert data["broker_cpu_s_per_round"] == pytest.approx(0.01)
    assert (data["aggregator_rss_mb_max"], data["open_files_max"]) == (54.0, 14)
    assert (data["uploads_expected"], data["uploads_counted"]) == (40, 39)
    assert (data["nacks"], data["reminders"]) == (1, 5)


def test_growth_is_of_training_rounds():
    """60 samples at most, each the first after its round, the last round among them; neither warm-up nor final round."""
    at = [(n / 2, n // 2) for n in range(2, 4004)]
    samples = [sample(at_s, n, aggregator_cpu_s=n / 50) for at_s, n in at]
    found = [one["closed"] for one in measurement.of_rounds(samples, 2000)]
    assert (len(found), found[0], found[-1], {b - a for a, b in itertools.pairwise(found)}) == (59, 28, 2000, {34})
    fleet = Fleet()
    fleet.rounds = 2000
    records = [
        {"round": n, "ordered": 10, "contributed": 10, "seconds": 1.0, "out_of_step": {}} for n in range(1, 2002)
    ]
    data = figures(fleet, records, samples, [])
    assert set(data["growth"]["flat"].values()) == {True}
    assert data["growth"]["rounds"] == 2000 - 28
    assert len(measurement.words(data)) == 4 + 6


def test_reader_follows_events_and_metrics(tmp_path, monkeypatch):
    """A page that is not there yet is waited for."""
    monkeypatch.setattr(page_readers, "SCRAPE_S", 0.01)
    with page_readers.page_reader(free_port()) as read:
        time.sleep(0.03)
    assert read == {"events": 0, "metrics": 0}
    place = PagePlace(tmp_path, names(3))
    with page_readers.page_reader(place.server.port) as read, place:
        place.publish()
        until(lambda: read["events"] >= 1 and read["metrics"] >= 3)
        place.publish(received=1)
        until(lambda: read["events"] >= 2)


@pytest.mark.parametrize(("growth", "flat"), [(0, True), (3_500, True), (200_000, False), (1_000_000, False)])
def test_a_database_that_grows_is_not_flat(growth, flat):
    """35 bytes a round are the run's record; more would be client updates that nothing deletes."""
    found = compared(
        [sample(60.0 * n, 100 * n, database_bytes=200_000 + growth * n, aggregator_cpu_s=0.5 * n) for n in range(12)]
    )
    assert found["flat"] == dict.fromkeys(SLACK, True) | {"database_bytes": flat}
    assert found["first_third"]["seconds_per_round"] == pytest.approx(0.6)
    assert found["last_third"]["aggregator_cpu_s_per_round"] == pytest.approx(0.005)
    assert (found["rounds"], found["minutes"], len(found["samples"])) == (1100, 11.0, 12)


@pytest.mark.parametrize(("count", "ends"), [(9, (1.0, 7.0)), (4, (0.5, 2.5))])
def test_thirds_have_two_samples_at_least(count, ends):
    """They leave out the middle; one without a closed round divides by one."""
    found = compared([sample(float(n), 5, rss_mb=n) for n in range(count)])
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


class SoakedFleet:
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

    monkeypatch.setattr(measurement, "time", types.SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    monkeypatch.setattr(
        measurement, "LoadFleet", lambda **options: made.append(SoakedFleet(clock, **options)) or made[-1]
    )
    return made


def test_soak_samples_from_warm_up_to_end(fleet):
    """A soak samples from its warm up to its end."""
    found = measurement.soak(7, 1.0)
    assert fleet[0].log == ["aggregator", "drivers", "closed"]
    assert fleet[0].options == {"devices": 7, "rounds": measurement.SOAK_ROUNDS}
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
        monkeypatch.setattr(SoakedFleet, name, value)
    with pytest.raises(StageError, match=f"no round closed for {STALLED_S:g} s\nthe end of the log"):
        measurement.soak(7, 60.0)
    assert fleet[0].log[-1] == "closed", "no process outlives the error"
