"""The tables of the page: reading of kept results, means over seeds, and the comparisons that a strategy fails."""

from __future__ import annotations

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


def test_tables_have_a_row_a_fleet():
    results = {"permuted-4": {"cfl": [result(), result(seed=1, mean=81.0, clusters=3, ari=0.25)]}}
    head, _, kind, row = page.models_table(results).splitlines()
    assert head.count("|") == row.count("|") == kind.count("|") == 11
    assert kind.startswith("| **clear groups of equal size** |")
    assert row.startswith("| `permuted-4`: 4 groups of 5, labels permuted (2) | - | - | - | 80.5 / 70 |")
    assert row.endswith("| 4 3; 1.00 0.25 |")
    assert "85.0 / 75" in page.personal_table(results)


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


def test_one_model_counts_without_groups():
    runs = runs_of(mean=50.0)
    assert list(page.misses(SCENARIOS["permuted-4"], runs, "cfl")) == []
    runs["true-groups"] = [result("true-groups", mean=86.6)]
    (miss,) = page.misses(SCENARIOS["permuted-4"], runs, "cfl")
    assert miss == "mean with the finish 85.0, true groups 86.6"


def test_tables_are_put_between_marks(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "load", lambda: {"alike": runs_of()})
    file = tmp_path / "page.md"
    file.write_text("".join(f"{page.MARK.format(n)}\nold\n{page.END.format(n)}\n" for n in page.TABLES))
    page.write(file)
    text = file.read_text()
    assert "old" not in text
    assert all(made({"alike": runs_of()}) in text for made in page.TABLES.values())
