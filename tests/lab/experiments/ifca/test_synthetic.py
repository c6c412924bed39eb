"""ifca-synthetic: the trials, the verdicts, the masks and the grid."""

import pytest
from shoal_lab.experiments import registry
from shoal_lab.experiments.common.experiment import Options
from shoal_lab.experiments.ifca import synthetic
from shoal_lab.experiments.ifca.synthetic import Point

from shoal.errors import UsageError
from tests.helpers.studies import run

SMALL = Point(k=2, m=8, n=12, scale=0.5, sigma=0.1, d=20)


EASY = Point(k=2, m=20, n=40, scale=1.0, sigma=0.1, d=20)
OPTIONS = Options(rounds=120, seed=3, values={"starts": 4, "settle": True})


def test_easy_trials_succeed():
    assert synthetic.run_trial(EASY, 0, OPTIONS)["success"]
    hopeless = synthetic.run_trial(Point(k=2, m=4, n=2, scale=1.0, sigma=0.01, d=60), 0, OPTIONS)
    assert not hopeless["success"]
    assert hopeless["starts"] == OPTIONS.values["starts"]


def small(settings, mask="permutation"):
    given = {"dimension": 20, "trials": 2, "starts": 3, **settings}
    return run("ifca-synthetic", rounds=60, devices=16, samples=30, settings=given, mask=mask)


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_results_hold_every_points_success(mask):
    data = small({"curves": "ab", "norm": "off"}, mask)
    assert list(data["success"]) == ["a", "b"]
    for name, k in (("a", 2), ("b", 4)):
        panel = data["success"][name]
        assert (panel["k"], panel["axis"]) == (k, "R")
        assert len(panel["points"]) == 6
        assert all(p["trials"] == 2 and 0 <= p["probability"] <= 1 for p in panel["points"])
    assert data["accuracy"] is None
    assert len(data["history"]) == 12
    assert data["parameters"]["mask"] == mask


@pytest.mark.parametrize("grid", ["default", "paper"])
def test_curves_have_lines_of_three_points(grid):
    for curve in synthetic.CURVES.values():
        points = list(synthetic.points_of(curve, registry.find("ifca-synthetic").resolved(Options(grid=grid))))
        along, across = curve.grids[grid]
        assert len(along) >= 3
        assert len(across) >= 2
        assert len(points) == len(along) * len(across)
        assert all(p.k == curve.k and p.m % p.k == 0 for _, p in points)


def test_the_papers_grid_runs_everything():
    assert synthetic.CURVES["a"].grids["paper"][0] == (0.1, 0.25, 0.5, 0.75, 1.0)
    assert synthetic.PAPER_TRIALS == 40
    settings = {"dimension": 5, "trials": 1}
    result = run("ifca-synthetic", grid="paper", rounds=3, devices=8, samples=3, settings=settings)
    assert result["parameters"]["settle"] is False
    assert result["parameters"]["starts"] == 10
    every = sum(len(panel["points"]) for panel in result["success"].values())
    assert result["start_iterations"] == every * 30 * 3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"settings": {"curves": "ax"}}, "curves"),
        ({"settings": {"settle": "red"}}, "on or off"),
        ({"devices": 7}, "split into"),
        ({"settings": {"starts": "0"}}, "start"),
    ],
)
def test_impossible_options_are_refused(changes, match):
    with pytest.raises(UsageError, match=match):
        run("ifca-synthetic", **changes)


def test_the_cost_is_measured_for_both_ways():
    costs = synthetic.cost(SMALL, OPTIONS)
    assert costs["simulator_ratio"] == pytest.approx(costs["simulator_s"] / costs["batched_s"])
    assert costs["numpy_ratio"] == pytest.approx(costs["numpy_s"] / costs["batched_s"])
    assert min(costs.values()) > 0
