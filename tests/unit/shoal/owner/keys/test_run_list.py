"""The signed runs of an owner's directory: in order of their numbers, and only those that this owner signed."""

import pytest

from crypto.seal.identity import Identity, sign_document
from shoal.owner.keys.run_list import signed_plans, summary, summary_line
from shoal.owner.keys.vault import run_file
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPackage
from shoal.protocol.recipe import Recipe, knobs
from shoal.util.files import write_private
from tests.helpers.plans import run_plan


def add(fleet, plan, *, signer=None, name=""):
    """Write a run file, by default under the plan's own number."""
    package = RunPackage(sign_document(signer or fleet.owner, plan), b"task", b"origins")
    path = run_file(fleet.path, plan.run)
    write_private(path.with_name(name) if name else path, encode(package))


def test_runs_are_listed_by_number(fleet):
    """Runs are listed by number and not by file name."""
    assert signed_plans(fleet, pytest.fail) == []
    for run, name in ((12, "a.run"), (3, "c.run"), (7, "b.run")):
        add(fleet, run_plan(run=run), name=name)
    (fleet.path / "runs" / "notes.txt").write_text("not a run")
    assert [plan.run for plan in signed_plans(fleet, pytest.fail)] == [3, 7, 12]


def test_file_of_no_run_is_skipped(fleet):
    """Junk, another owner's run, and a file that others can read."""
    add(fleet, run_plan(run=1))
    add(fleet, run_plan(run=2), signer=Identity.generate("owner"))
    write_private(fleet.path / "runs" / "junk.run", b"junk")
    add(fleet, run_plan(run=4))
    run_file(fleet.path, 4).chmod(0o644)
    complaints = []
    assert [plan.run for plan in signed_plans(fleet, complaints.append)] == [1]
    assert [c.partition(" is no run of this fleet: ")[0] for c in complaints] == [
        "000002.run",
        "000004.run",
        "junk.run",
    ]
    assert "signature" in complaints[0]


def test_summary():
    """A run for some devices names their label in its line, and one with a keeper that keeper; others neither."""
    plan = run_plan(run=5, rounds=7, min_contributors=3, weighting="uniform", norm_noise=0.1, mode="rotation")
    chosen = {name: getattr(plan.recipe, name) for name in knobs(Recipe)}
    assert summary(plan) == {"run": 5, "algorithm": "fedavg", "keeper": "", **chosen}
    assert not {"only", "keeper"} & set(summary_line(summary(plan)).split())
    line = summary_line({**summary(plan), "only": "site=berlin", "keeper": "box"})
    assert line.endswith(", for site=berlin only, keeper box")
