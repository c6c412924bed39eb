"""The table of loads: a line for each saved result, in the order of the fleets, between the page's marks."""

import subprocess

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
    return tmp_path


def save(model, algorithm, devices, **changes):
    data = {name: one for name, one in {**DATA, "devices": devices, **changes}.items() if one is not None}
    record.save(table.ROOT / table.FILE, data, command=table.command_of(model, algorithm, devices))


def test_without_results_there_are_headings_alone():
    head, line = table.block().splitlines()
    assert head.startswith("| model | algorithm | devices | s a round |")
    assert set(line) == {"|", "-"}
    assert head.count("|") == line.count("|")


def test_a_line_has_the_figures_and_a_link_to_its_result():
    save("logistic", "fedavg", 500)
    assert table.block().splitlines()[2] == (
        "| [logistic](../results/load.jsonl) | fedavg "
        "| 500 | 1.23 | 0.50 | 0.00 | 98 | 523 | 2999 of 3000 | 0 | 12 "
        "| min_contributors 1, quorum 1, deadline_s 3600 |"
    )


def test_lines_are_in_the_order_of_the_fleets_whichever_was_measured_first():
    for model, algorithm, devices in (("mlp", "cfl", 10), ("logistic", "cfl", 100), ("logistic", "fedavg", 2000)):
        save(model, algorithm, devices)
    save("logistic", "fedavg", 10)
    lines = [line.split("|") for line in table.block().splitlines()[2:]]
    found = [(cells[1].strip().partition("]")[0][1:], cells[2].strip(), int(cells[3])) for cells in lines]
    assert found == [
        ("logistic", "fedavg", 10),
        ("logistic", "fedavg", 2000),
        ("logistic", "cfl", 100),
        ("mlp", "cfl", 10),
    ]


def test_a_result_without_a_figure_is_an_error_and_no_gap():
    save("mlp", "ifca", 10, nacks=None)
    with pytest.raises(KeyError, match="nacks"):
        table.block()


def test_every_fleet_is_measured_from_the_root_and_saved_where_the_table_reads_it(monkeypatch, root):
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda words, **options: calls.append((words, options)))
    table.run()
    assert len(calls) == len(table.ALGORITHMS) * sum(len(sizes) for sizes in table.FLEETS.values())
    assert {(options["cwd"], options["check"]) for _, options in calls} == {(root, True)}
    words = calls[0][0]
    expected = "bench load --devices 10 --model logistic --algorithm fedavg --rounds 5 --save results/load.jsonl"
    assert " ".join(words[3:]) == expected


def test_the_first_failed_measurement_ends_the_series(monkeypatch):
    calls = []

    def fail(words, **_options):
        calls.append(words)
        raise subprocess.CalledProcessError(3, words)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        table.run()
    assert len(calls) == 1


def test_the_table_replaces_the_earlier_one_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold table\n{table.END}\nafter\n")
    save("mlp", "ifca", 10)
    table.write(page)
    once = page.read_text()
    assert once == f"before\n{table.BEGIN}\n{table.block()}\n{table.END}\nafter\n"
    table.write(page)
    assert page.read_text() == once
