"""The tables of the page: reading of kept results, means over seeds, and the comparisons that a strategy fails."""

from __future__ import annotations

import pytest
from shoal_lab.experiments import table
from shoal_lab.experiments.wild import page
from shoal_lab.experiments.wild.scenarios import SCENARIOS

from shoal.report import record

STRATEGIES = ("cfl", "fedavg", "local", "true-groups")


def result(strategy="cfl", seed=0, **changes):
    made = {
        "experiment": "wild",
        "algorithm": strategy,
        "scenario": "alike",
        "strategy": strategy,
        "seed": seed,
        "measure": "accuracy",
        "mean": 80.0,
        "worst": 70.0,
        "personal_mean": 85.0,
        "personal_worst": 75.0,
        "ari": 1.0,
        "clusters": 4,
        "standing_still": 0,
        "parameters": {"groups": 1},
    }
    return {**made, **changes}


def keep(folder, *results, command="wild"):
    data = {"experiment": command, "results": list(results)}
    record.save(folder / f"{command}.jsonl", data, command=["shoal", "simulate", command], name=str(id(data)))


def runs_of(**changes):
    """Return one run of each strategy that a comparison needs; ``changes`` are CFL's."""
    return {name: [result(name, **(changes if name == "cfl" else {}))] for name in STRATEGIES}


def test_results_are_in_order_of_seeds(tmp_path):
    keep(tmp_path, result(scenario="drift-all", seed=2), result(scenario="permuted-4"))
    keep(tmp_path, result(scenario="drift-all", seed=1), result("fedavg", scenario="drift-all"))
    keep(tmp_path, {"experiment": "newcomers"}, command="newcomers")
    found = page.load(tmp_path)
    assert list(found) == ["permuted-4", "drift-all"]
    assert [r["seed"] for r in found["drift-all"]["cfl"]] == [1, 2]
    assert list(found["drift-all"]) == ["fedavg", "cfl"]
    assert [run.data["experiment"] for run in table.load(tmp_path)] == ["newcomers"]


def test_figures_are_means_over_seeds():
    found = page.figures([result(mean=80.0, ari=1.0), result(mean=90.0, ari=0.5, standing_still=2)])
    assert (found["mean"], found["aris"], found["still"]) == (85.0, [1.0, 0.5], [0, 2])
    sound = {"mean": 88.0, "worst": 82.0, "personal_mean": 89.0, "personal_worst": 83.0}
    assert page.figures([result(sound=sound)])["worst"] == 82.0, "faulty devices are left out"


def test_tables_have_a_row_a_fleet():
    results = {"permuted-4": {"cfl": [result(), result(seed=1, mean=81.0, clusters=3, ari=0.25)]}}
    head, _, kind, row = page.models_table(results).splitlines()
    assert head.count("|") == row.count("|") == kind.count("|") == 11
    assert kind.startswith("| **clear groups of equal size** |")
    assert row.startswith("| `permuted-4`: 4 groups of 5, labels permuted (2) | - | - | - | 80.5 / 70 |")
    assert row.endswith("| 4 3; 1.00 0.25 |")
    assert "85.0 / 75" in page.personal_table(results)
    errors = {"measure": "squared error", "mean": 0.494, "worst": 0.961}
    assert "0.49 / 0.96" in page.models_table({"table-diabetes": {"cfl": [result(**errors)]}})


def test_a_cell_of_fewer_seeds_says_so():
    results = {"alike": {"cfl": [result(), result(seed=1)], "ifca": [result("ifca")]}}
    assert (
        page.personal_table(results)
        .splitlines()[-1]
        .endswith("(2) | - | - | - | 85.0 / 75 | 85.0 / 75 (1) | - | - | - |")
    )


def test_common_seeds_are_compared():
    runs = {name: [*found, result(name, seed=1, mean=99.0, personal_mean=99.0)] for name, found in runs_of().items()}
    runs["cfl"] = runs["cfl"][:1]
    assert list(page.misses(SCENARIOS["alike"], runs, "cfl")) == []
    runs["cfl"] = [result(seed=2)]
    assert list(page.misses(SCENARIOS["alike"], runs, "cfl")) == []


def test_kinds_are_means_over_common_seeds():
    def fleet(**changes):
        return {name: [result(name, **changes)] for name in page.COLUMNS}

    alike = fleet(personal_mean=84.0)
    alike["cfl"] = [*alike["cfl"], result(seed=1, personal_mean=10.0)]
    without = fleet()
    without.pop("ifca")
    results = {"alike": alike, "alike-cnn": fleet(personal_mean=90.0), "alike-3-labels": without}
    results["table-diabetes"] = fleet(measure="squared error")
    (row,) = page.kinds_table(results).splitlines()[2:]
    assert row == "| no groups | 2 |" + " 87.0 |" * len(page.COLUMNS)


def test_algorithms_near_the_best_are_named():
    figures = {"fedavg": 80.0, "local": 70.0, "cfl": 84.0, "ifca": 83.6, "fedgroup": 83.4, "one-shot": 10.0}
    fleet = {name: [result(personal_mean=mean, personal_worst=mean - 5)] for name, mean in figures.items()}
    (row,) = page.choice_table({"alike": fleet}).splitlines()[2:]
    cells = "80.0 / 75 | 70.0 / 65 | 84.0 / 79 | 83.6 / 79 | 83.4 / 78 | 10.0 / 5"
    assert row == f"| no groups | 1 | {cells} | CFL, IFCA |"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"personal_mean": 84.4}, ["mean with the finish 84.4, FedAvg with the finish 85.0"]),
        ({"personal_worst": 67.9}, ["worst device with the finish 67.9, local training 70.0"]),
        ({"mean": 79.6}, ["mean of the models 79.6, FedAvg 80.0"]),
        ({"standing_still": 3}, ["devices whose model stands still: 3"]),
    ],
)
def test_misses_name_both_figures(changes, found):
    assert list(page.misses(SCENARIOS["alike"], runs_of(**changes), "cfl")) == found


def test_one_model_counts_without_groups():
    runs = runs_of(mean=50.0)
    assert list(page.misses(SCENARIOS["permuted-4"], runs, "cfl")) == []
    runs["true-groups"] = [result("true-groups", mean=86.6)]
    (miss,) = page.misses(SCENARIOS["permuted-4"], runs, "cfl")
    assert miss == "mean with the finish 85.0, true groups 86.6"


def test_a_larger_error_is_worse():
    errors = {"measure": "squared error", "worst": 90.0, "personal_worst": 90.0}
    runs = {name: [{**runs[0], **errors}] for name, runs in runs_of(personal_mean=84.1).items()}
    assert list(page.misses(SCENARIOS["table-diabetes"], runs, "cfl")) == [
        "mean with the finish 84.10, local training 80.00",
        "mean with the finish 84.10, true groups 80.00",
    ]


def test_without_references_no_comparison():
    assert list(page.misses(SCENARIOS["alike"], {"cfl": [result(mean=1.0)]}, "cfl")) == []
    assert page.misses_table({"alike": runs_of(mean=1.0)}).splitlines()[2].startswith("| `alike` | CFL | mean of the")


def test_tables_are_put_between_marks(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "load", lambda: {"alike": runs_of()})
    file = tmp_path / "page.md"
    file.write_text("".join(f"{page.MARK.format(n)}\nold\n{page.END.format(n)}\n" for n in page.TABLES))
    page.write(file)
    text = file.read_text()
    assert "old" not in text
    assert all(made({"alike": runs_of()}) in text for made in page.TABLES.values())
