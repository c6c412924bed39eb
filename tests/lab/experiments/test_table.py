"""The table of kept results: reading of the files, grouping of runs by setting, and the text of each cell."""

from __future__ import annotations

import pytest
from shoal_lab.experiments import table
from shoal_lab.experiments.table import BEGIN, END, ROOT, Kept, block, load, write

from shoal.report import record


def keep(folder, name, command, data):
    record.save(folder / f"{name}.jsonl", data, command=command)


def run(experiment="cfl-noise", algorithm="cfl", accuracy=90.0, **more):
    of = {"experiment": experiment, "algorithm": algorithm, "accuracy": accuracy}
    return of | {"ari": None, "published": None, "parameters": {}} | more


def test_runs_are_read_in_order_of_files(tmp_path):
    keep(tmp_path, "b", ["shoal", "simulate", "x", "--seed", "2"], run())
    keep(tmp_path, "a", ["shoal", "simulate", "y"], {"experiment": "y", "results": [run(algorithm="p"), run()]})
    keep(tmp_path, "c", ["shoal", "bench", "load"], {"any": "thing"})
    (tmp_path / "d.txt").write_text("no result")
    found = load(tmp_path)
    assert [(k.file.name, k.words, k.seed) for k in found] == [
        ("a.jsonl", ("y",), 0),
        ("a.jsonl", ("y",), 0),
        ("b.jsonl", ("x",), 2),
    ]
    assert [k.data["algorithm"] for k in found] == ["p", "cfl", "cfl"]


@pytest.mark.parametrize(
    ("command", "words", "seed"),
    [
        (["x", "--seed", "3", "--set", "a=1"], ("x", "--set", "a=1"), 3),
        (["x", "--seed=3", "--json", "--set=a=1"], ("x", "--set=a=1"), 3),
        (["--save", "f", "x", "--data-dir=d", "--plot", "p.png", "--checkpoint", "c"], ("x",), 0),
        (["x", "--mask", "none"], ("x", "--mask", "none"), 0),
    ],
)
def test_seeds_and_files_are_left_out(command, words, seed):
    assert table._words(command) == (words, seed)


def kept(seed=0, words=("cfl-noise",), **data):
    return Kept(ROOT / "results" / "cfl.jsonl", words, seed, run(**data))


def row(*runs):
    (line,) = block(runs).splitlines()[2:]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_runs_of_one_setting_are_one_line():
    runs = [kept(7, accuracy=80.0, ari=1.0), kept(0, accuracy=91.256, ari=0.5), kept(3, accuracy=85.0, ari=0.75)]
    assert row(*runs) == [
        "`cfl-noise`",
        "cfl",
        "-",
        "mean 85.42; 0: 91.26; 3: 85.00; 7: 80.00",
        "0.50 to 1.00",
        "min_contributors 1, no weight cap, no norm limits, robust off, no mask",
        "[cfl](../results/cfl.jsonl)",
    ]


def test_lines_are_in_the_papers_order():
    runs = [
        kept(words=("cfl-noise", "--set", "trials=9")),
        kept(words=("newcomers",), experiment="newcomers", algorithm="fedavg"),
        kept(),
        kept(words=("ifca-synthetic",), experiment="ifca-synthetic", algorithm="ifca"),
        kept(algorithm="fedavg"),
    ]
    lines = [line.split(" | ")[:2] for line in block(runs).splitlines()[2:]]
    assert lines == [
        ["| `ifca-synthetic`", "ifca"],
        ["| `cfl-noise`", "cfl"],
        ["| `cfl-noise`", "fedavg"],
        ["| `cfl-noise --set trials=9`", "cfl"],
        ["| `newcomers`", "fedavg"],
    ]


@pytest.mark.parametrize(
    ("aris", "shown"),
    [([None, None], "-"), ([1.0, 1.0], "1.00"), ([None, 0.5], "0.50"), ([-0.02, -0.1], "-0.10 to -0.02")],
)
def test_one_index_is_shown_once(aris, shown):
    assert row(*[kept(i, ari=ari) for i, ari in enumerate(aris)])[4] == shown


NORMS = {"mean_updates": 0.0123, "largest_updates": 0.9}
RISES = {"a": {"rises": {"R 1": True, "R 2": False}}, "b": {"rises": {"R 1": True}}}


SHOWN = "1 91.3 / 80.0, 3 95.0 / 90.0"


CLASSES = {"1": {"max": 91.26, "median": 80.0}, "3": {"max": 95.0, "median": 90.04}}


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({"accuracy_last": 88.0}, "90.00 (last 88.00)"),
        ({"newcomers": {"right": 7, "tries": 9}}, "7 of 9 right"),
        (
            {"accuracy": None, "at_the_end_congruent": NORMS, "at_the_end_incongruent": NORMS},
            "congruent: mean 0.01, largest 0.9; incongruent: mean 0.01, largest 0.9",
        ),
        ({"accuracy": None, "success": RISES}, "rises on 2 of 3 lines"),
        ({"accuracy": None, "classes": CLASSES}, "1 91.3 / 80.0, 3 95.0 / 90.0"),
        (
            {"accuracy": None, "gap": {"updates": 0.456, "gradients": 0.123}},
            "gap 0.46 with updates, 0.12 with gradients",
        ),
        ({"accuracy": None, "least_chance_k10_gamma1": 0.98}, "at least 0.98 at gamma 1 from k = 10"),
        ({"accuracy": None, "at_the_end_congruent": NORMS}, "see file"),
        ({"accuracy": 0.0}, "0.00"),
    ],
)
def test_our_figure_is_the_experiments(data, shown):
    if "classes" in data:
        data = {**data, "published": data["classes"]}
    assert row(kept(**data))[3] == f"0: {shown}"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({"published": 96.0}, "96.0"),
        ({"published": "positive from 20"}, "positive from 20"),
        ({"published": {"perplexity": 36.0, "splits": "late"}}, "perplexity 36.0, splits late"),
        (
            {"accuracy": None, "classes": CLASSES, "published": CLASSES},
            f"classes a device, max / median: {SHOWN}",
        ),
    ],
)
def test_the_published_figures_are_shown(data, shown):
    assert row(kept(**data))[2] == shown


def test_only_text_between_marks_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "load", lambda: [kept()])
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page)
    assert page.read_text() == f"before\n{BEGIN}\n{block([kept()])}\n{END}\nafter\n"
