"""cfl-gap-samples and cfl-gap-rounds on tiny files in the true format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from shoal_lab.experiments.cfl import gap as cfl_gap
from shoal_lab.experiments.cfl.gap import GRADIENT, gradients, positive_from
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


def test_the_gap_grows_during_training(data_sets: Path) -> None:
    rows = run("cfl-gap-rounds", data_sets, devices=8, samples=80, rounds=12, settings={**MLP, "trials": 1})["history"]
    assert [r["round"] for r in rows] == list(range(1, 13))
    assert rows[-1]["gap_updates"] > rows[0]["gap_updates"]


def test_no_trials_are_refused(data_sets: Path) -> None:
    with pytest.raises(UsageError, match="trials is a whole number of at least 1, not 0"):
        run("cfl-gap-samples", data_sets, settings={"trials": 0})
