"""The load bench's fleet: limits on open files and devices, and a run that has not begun."""

import resource

import pytest
from shoal_lab.bench.load import driver as load_driver
from shoal_lab.bench.load import fleet_load as load

from aggregator.storage.run_status import rounds_closed, uploads_stored
from shoal.errors import ConfigError, UsageError
from tests.helpers.trees import python


def test_a_hard_limit_that_is_too_low_is_named(monkeypatch):
    monkeypatch.setattr(load, "raise_open_files", lambda: 1024)
    with pytest.raises(ConfigError, match="1564 open files") as failed:
        load._check_open_files(1500)
    assert "ulimit" in failed.value.hint


def test_more_devices_than_a_roster_takes_are_refused():
    with pytest.raises(UsageError, match="65534"):
        load._check_open_files(70_000)


def test_raising_the_soft_limit_leaves_the_hard_one(monkeypatch):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, pair: set_to.append(pair))
    assert load_driver.raise_open_files() == 4096
    assert set_to == [(4096, 4096)]


def test_a_run_that_has_no_directory_yet_has_no_rounds(tmp_path):
    assert (rounds_closed(tmp_path), uploads_stored(tmp_path, 1)) == (0, 0)


def test_the_help_of_bench_aggregator_says_what_it_leaves_out():
    shown = " ".join(python("from shoal.cli import main; main()", "bench", "aggregator", "--help").stdout.split())
    assert "leaves out the daemon's event queue, MQTT and the broker, acknowledgements on the wire" in shown
