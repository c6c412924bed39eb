"""The load bench: limits on its fleet, the figures of a run, and the reader of its page."""

import itertools
import time

import pytest
from shoal_lab.bench.load import fleet_load, measurement
from shoal_lab.bench.load.measurement import figures

from shoal.errors import ConfigError, UsageError
from shoal.transport.local_broker import free_port
from tests.helpers import page_readers
from tests.helpers.pages import PagePlace, names
from tests.helpers.waiting import until
from tests.lab.bench.load.loads import sample


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
