"""The page of results agrees with the files in results/, which hold all that is needed to run each again."""

from pathlib import Path

from shoal_lab.bench.load import table as load_table
from shoal_lab.experiments import table
from shoal_lab.experiments.wild import page as wild_page

from shoal.report import record

RUNS = table.load()
INCOMPLETE = Path(__file__).with_name("results_incomplete.txt")
"""Results of earlier versions, and what each lacks."""
MOST_BYTES = 4_000_000


def test_page_holds_table_of_kept_results():
    page = table.PAGE.read_text()
    shown = page.partition(table.BEGIN)[2].partition(table.END)[0].strip()
    assert shown == table.block(RUNS), "run python -m shoal_lab.experiments.table --write"


def test_page_of_wild_fleets_has_its_tables():
    """The page of wild fleets holds the tables of the kept results."""
    page, results = wild_page.PAGE.read_text(), wild_page.load()
    assert results
    for name, made in wild_page.TABLES.items():
        begin, end = wild_page.MARK.format(name), wild_page.END.format(name)
        shown = page.partition(begin)[2].partition(end)[0].strip()
        assert shown == made(results), "run python -m shoal_lab.experiments.wild.page --write"


def test_page_for_researchers_has_the_race():
    """The page for researchers has the figures of the race."""
    (race,) = record.read_lines(table.RESULTS / "race.jsonl")
    rows = race["data"]["rows"]
    page = (table.RESULTS.parent / "docs" / "researcher" / "simulate.md").read_text()
    for task in {row["task"] for row in rows}:
        own, *peers = (row for row in rows if row["task"] == task)
        cells = [f"{own['cpu_seconds_per_round']:.2g}", *(f"{row['ratio']:.1f}" for row in peers)]
        assert f"| {' | '.join(cells)} |\n" in page, task


def test_results_name_no_place_of_a_machine():
    """Kept results name no place of the machine that they are from."""
    for file, document in record.load(table.RESULTS):
        assert {"command", "commit", "date", "machine", "data"} <= document.keys(), file
        assert not [w for w in document["command"] if w.startswith("/") or "=/" in w], file


def test_results_name_cpu_and_commit():
    """Results that lack one of them are listed beside this test: a new one may not, and one made again leaves the list."""
    found = [
        f"{' '.join(record.key_of(document))}: {', '.join(record.lacking(document))}"
        for _, document in record.load(table.RESULTS)
        if record.lacking(document)
    ]
    assert sorted(found) == INCOMPLETE.read_text().splitlines()


def test_all_results_are_small():
    files = list(table.RESULTS.iterdir())
    assert {file.suffix for file in files} == {record.LINES}
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


def test_every_kept_run_has_its_parameters():
    assert RUNS
    for run in table.load_all():
        assert run.data["experiment"] == run.words[0], run.file
        assert run.data["parameters"] if "parameters" in run.data else len(run.data) > 12, run.file


def test_no_kept_load_lost_upload_or_a_chunk():
    kept = {record.key_of(run): run["data"] for run in record.read_lines(load_table.ROOT / load_table.FILE)}
    in_table = {
        load_table.command_of(model, algorithm, devices)
        for model, fleets in load_table.FLEETS.items()
        for algorithm in load_table.ALGORITHMS
        for devices in fleets
    }
    assert in_table <= kept.keys()
    for key, data in kept.items():
        assert data["uploads_counted"] == data["uploads_expected"], key
        assert data["nacks"] == 0, key
