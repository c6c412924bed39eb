"""The table of loads: a line for each saved result, in the order of the fleets."""

import pytest
from shoal_lab.bench.load import table

from shoal.report import record

DATA = {
    "devices": 500,
    "seconds_per_round_median": 1.2345,
    "aggregator_cpu_ms_per_upload": 0.5,
    "broker_cpu_s_per_round": 0.0,
    "aggregator_rss_mb_max": 97.6,
    "open_files_max": 523,
    "uploads_counted": 2999,
    "uploads_expected": 3000,
    "nacks": 0,
    "reminders": 12,
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty folder of results."""
    monkeypatch.setattr(table, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / table.FILE).touch()


def save(model, algorithm, devices, data=DATA):
    record.save(table.ROOT / table.FILE, data, command=table.command_of(model, algorithm, devices))


def test_lines_are_in_the_fleets_order():
    for run in (("mlp", "cfl", 10), ("logistic", "cfl", 100), ("logistic", "fedavg", 2000), ("logistic", "fedavg", 10)):
        save(*run, DATA | {"devices": run[2]})
    lines = [line.split("|") for line in table.block().splitlines()[2:]]
    found = [(cells[1].strip().partition("]")[0][1:], cells[2].strip(), int(cells[3])) for cells in lines]
    assert found == [
        ("logistic", "fedavg", 10),
        ("logistic", "fedavg", 2000),
        ("logistic", "cfl", 100),
        ("mlp", "cfl", 10),
    ]


def test_line_has_figures_and_link():
    """A line has the figures and a link to its result."""
    assert len(table.block().splitlines()) == 2
    save("logistic", "fedavg", 500)
    assert table.block().splitlines()[2] == (
        "| [logistic](../results/load.jsonl) | fedavg "
        "| 500 | 1.23 | 0.50 | 0.00 | 98 | 523 | 2999 of 3000 | 0 | 12 "
        "| min_contributors 1, quorum 1, deadline_s 3600 |"
    )
