"""cfl-gap-samples and cfl-gap-rounds on tiny files in the true format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from shoal_lab.experiments.cfl import gap as cfl_gap
from shoal_lab.experiments.cfl.gap import GRADIENT, gradients, positive_from
from shoal_lab.experiments.data.datasets import load
from shoal_lab.experiments.studies.watch import gap_of
from torch.nn import functional

from shoal.errors import UsageError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.simulate import sim_plan
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import Cnn, Network, OneHidden, origins
from tests.helpers.studies import run

MLP = {"model": "mlp", "hidden": 16}


@pytest.mark.parametrize(
    "network",
    [OneHidden(9, 4, 3), Cnn(side=9, classes=3, filters=(2,), dense=(4,), kernel=3)],
    ids=["mlp", "cnn"],
)
def test_gradients_are_those_of_autograd(network: Network) -> None:
    """One large step on all samples is the full gradient, to float32's precision."""
    rng = np.random.default_rng(4)
    pixels = 81 if isinstance(network, Cnn) else 9
    shards = tuple(Shard(rng.random((n, pixels), np.float32), rng.integers(0, 3, n)) for n in (6, 6, 4))
    plan = sim_plan("fedavg", {}, network, sim_options(rounds=1, local=LocalTraining(epochs=1, batch_size=4, lr=0.1)))
    start = origins(network, 1, 3)
    found = gradients(Workforce(Population(shards), network, plan, start), start[0]) / -GRADIENT.lr
    for row, shard in zip(found, shards, strict=True):
        theta = torch.from_numpy(start[0]).requires_grad_()
        parts, at = [], 0
        for shape in network.shapes:
            size = int(np.prod(shape))
            parts.append(theta[at : at + size].view(shape))
            at += size
        loss = functional.cross_entropy(network.forward(parts, torch.from_numpy(shard.x)), torch.from_numpy(shard.y))
        (expected,) = torch.autograd.grad(loss, theta)
        assert np.allclose(row, expected.numpy(), rtol=1e-4, atol=1e-6)


def test_a_gap_knows_a_right_bipartition() -> None:
    """Groups at right angles have a gap of 1; if one group's devices are opposed, the bipartition cuts that group."""
    east, north = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    good = gap_of([east, 2 * east, north, north], [0, 0, 1, 1])
    assert good.gap == pytest.approx(1.0)
    assert good.right
    bad = gap_of([east, -east, north, north], [0, 0, 1, 1])
    assert bad.gap < 0
    assert not bad.right


def test_a_gap_counts_from_where_it_stays() -> None:
    """A point that is positive before a negative one does not count."""
    rows = [
        {"samples": n, **{f"gap_{k}": g for k in cfl_gap.KINDS}, **{f"trials_{k}": [g, t] for k in cfl_gap.KINDS}}
        | {f"right_{k}": 2 for k in cfl_gap.KINDS}
        for n, g, t in ((10, 0.2, 0.2), (20, -0.1, 0.1), (50, 0.3, -0.1), (100, 0.4, 0.4))
    ]
    marks = positive_from(rows, "samples")["updates"]
    assert marks == {"mean": 50, "every_trial": 100, "right_bipartition": 10}


def test_positive_gaps_cut_no_group() -> None:
    """Corollary 1, on three groups about random directions, with more noise in each draw; groups of one have no pair."""
    rng, found = np.random.default_rng(0), []
    for spread in np.linspace(0, 2, 60):
        centres, groups = rng.standard_normal((3, 8)), [0, 0, 1, 1, 2, 2, 2]
        found.append(gap_of(list((centres[groups] + spread * rng.standard_normal((7, 8))).astype(np.float32)), groups))
    assert all(each.right for each in found if each.gap > 0)
    assert {each.gap > 0 for each in found} == {each.right for each in found} == {True, False}
    assert gap_of(list(np.eye(2, dtype=np.float32)), [0, 1]).intra_min == 1.0


def test_gaps_over_samples(data_sets: Path) -> None:
    """With enough samples groups part; every point names its trials, and fewer samples part less."""
    data = run("cfl-gap-samples", data_sets, devices=8, rounds=15, settings={**MLP, "points": "4,100", "trials": 2})
    few, many = data["history"]
    assert (few["samples"], many["samples"]) == (4, 100)
    assert len(many["trials_updates"]) == len(many["trials_gradients"]) == 2
    assert many["gap_updates"] > 0.1
    assert many["right_updates"] == 2
    assert many["gap_updates"] > few["gap_updates"]
    assert data["gap"] == {k: many[f"gap_{k}"] for k in cfl_gap.KINDS}
    assert data["parameters"]["seeds"] == [0, 1000]
    assert data["accuracy"] is None
    assert data["published"].startswith("positive from 20")
    with pytest.raises(UsageError, match="trials is a whole number of at least 1, not 0"):
        run("cfl-gap-samples", data_sets, settings={"trials": 0})


def test_the_gap_grows_during_training(data_sets: Path) -> None:
    rows = run("cfl-gap-rounds", data_sets, devices=8, samples=80, rounds=12, settings={**MLP, "trials": 1})["history"]
    assert [r["round"] for r in rows] == list(range(1, 13))
    assert rows[-1]["gap_updates"] > rows[0]["gap_updates"]


# -- cfl-congruence: the devices of both cases, and the norms that tell them apart --


def test_congruent_devices_hold_other_digits(data_sets: Path) -> None:
    """One has 0 to 4, the other 5 to 9; incongruent ones hold all of them under two namings."""
    data = load("mnist", data_sets)
    low, high = cfl_gap.population_of("congruent", data, 50, 1).train
    assert set(low.y) <= set(range(5))
    assert set(high.y) <= set(range(5, 10))
    other = cfl_gap.population_of("incongruent", data, 200, 1)
    assert other.groups is not None
    assert set(other.groups) == {0, 1}
    assert all(len(set(s.y)) == 10 for s in other.train)
    with pytest.raises(UsageError, match="images of five digits"):
        cfl_gap.population_of("congruent", data, 800, 1)


def test_norms_of_both_cases_are_reported(data_sets: Path) -> None:
    """The mean is never longer than the longest; gradients come every few rounds."""
    data = run("cfl-congruence", data_sets, samples=60, rounds=8, settings={**MLP, "gradients_every": 4})
    assert [r["round"] for r in data["history"]] == list(range(1, 9))
    for row in data["history"]:
        for case in cfl_gap.CASES:
            assert 0 < row[f"norm_{case}_mean_updates"] <= row[f"norm_{case}_largest_updates"]
    assert [r["round"] for r in data["history"] if "norm_congruent_mean_gradients" in r] == [1, 5]
    assert set(data["at_the_end_congruent"]) == set(data["at_the_end_incongruent"])
    with pytest.raises(UsageError, match="two devices"):
        run("cfl-congruence", data_sets, devices=3)


def test_norms_are_those_of_eqs_32_and_33() -> None:
    """Opposed updates cancel in the mean; equal ones don't."""
    rows = np.array([[3, 4], [-3, -4]], np.float32)
    assert cfl_gap._norms(rows, "updates") == {"mean_updates": 0.0, "largest_updates": 5.0}
    rows = np.array([[3, 4], [0, 0]], np.float32)
    assert cfl_gap._norms(rows, "x") == {"mean_x": 2.5, "largest_x": 5.0}


def row(value: float, **more: float) -> dict[str, float]:
    return {"mean_updates": value, "largest_updates": 2 * value, "loss": value, **more}


def test_the_summary_is_of_the_last_tenth() -> None:
    """Twenty rounds: the last two, 4 and 2, over the largest, 10; gradients were measured in one of them, or in none."""
    rows = [row(10.0, mean_gradients=8.0, largest_gradients=8.0), *[row(1.0)] * 17]
    rows += [row(4.0), row(2.0, mean_gradients=2.0, largest_gradients=4.0)]
    assert cfl_gap.summary(rows) == {
        "mean_updates": 0.3,
        "largest_updates": 0.3,
        "mean_gradients": 0.25,
        "largest_gradients": 0.5,
        "loss": 3.0,
    }
    found = cfl_gap.summary([row(2.0, mean_gradients=8.0, largest_gradients=8.0), row(1.0)])
    assert found["mean_gradients"] is found["largest_gradients"] is None
    assert found["mean_updates"] == 0.5
