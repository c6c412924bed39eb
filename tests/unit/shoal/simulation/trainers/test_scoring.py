"""Scores of several models on many devices: means, counts and the choice of the best."""

import numpy as np
import pytest
import torch

from shoal.simulation.data import Shard
from shoal.simulation.trainers import scoring
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.networks import Linear, Lstm, origins, unflatten
from shoal.simulation.trainers.scoring import behind, choose, preactivations, score
from tests.unit.shoal.simulation.trainers.trainers import INPUTS, NETWORKS, SIZES, shards

pytestmark = pytest.mark.torch


def sets_of(network):
    """Return five devices' samples in a shape that the network takes."""
    if not isinstance(network, Lstm):
        return [Shard(s.x, s.y) for s in shards(network, SIZES["unequal"])]
    rng = np.random.default_rng(0)
    return [Shard(rng.integers(0, 5, (n, 4)), rng.integers(0, 5, (n, 4))) for n in SIZES["unequal"]]


@pytest.mark.parametrize("network", [*NETWORKS.values(), Lstm(5, 3, 4, 1)], ids=[*NETWORKS, "lstm"])
def test_scores_are_those_of_each_model(network, monkeypatch):
    """Mean loss, right labels and labels seen; the same in chunks of a few samples."""
    data = sets_of(network)
    models = torch.from_numpy(origins(network, 3, 2))
    ids = np.array([3, 0, 2])
    for floats in (scoring.CHUNK_FLOATS, 1):
        monkeypatch.setattr(scoring, "CHUNK_FLOATS", floats)
        found = score(network, models, Shelf(data), ids)
        for row, place in enumerate(ids):
            x, y = torch.from_numpy(data[place].x), torch.from_numpy(data[place].y)
            assert found.tested[row] == y.numel()
            for j, theta in enumerate(models):
                with torch.no_grad():
                    losses, right = network.losses(network.forward(unflatten(network, theta), x), y)
                assert found.losses[row, j] == pytest.approx(float(losses.mean()), rel=1e-5)
                assert found.correct[row, j] == int(right.sum())


def test_chunks_cut_between_devices(monkeypatch):
    """300 samples and more a chunk: 200 + 200 would be too many, and no device is cut in two."""
    monkeypatch.setattr(scoring, "CHUNK_FLOATS", 300 * 1024)
    shelf = Shelf([Shard(np.zeros((n, 1), np.float32), np.zeros(n, np.float32)) for n in (200, 200, 50, 500, 20)])
    chunks = [counts.tolist() for _, _, counts in scoring._chunks(Linear(1), shelf, np.arange(5), 1)]
    assert chunks == [[200], [200, 50], [500], [20]]


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ([2.0, 1.0, 1.0], 1),
        ([np.nan, np.inf, 3.0], 2),
        ([np.nan, 5.0, np.inf], 1),
        # As on a device: an infinite loss before nan. A row without any number has no choice to make.
        ([np.nan, np.inf, np.inf], 1),
        ([np.inf, np.nan, np.nan], 0),
        ([np.nan, np.nan, np.nan], 0),
    ],
)
def test_choice_is_least_loss_and_never_nan(losses, chosen):
    assert choose(np.array([losses])).tolist() == [chosen]


@pytest.mark.parametrize("name", NETWORKS)
def test_first_layer_is_one_product(name):
    """The first layer of all models is one product."""
    network = NETWORKS[name]
    models = torch.from_numpy(origins(network, 3, 2))
    params, x = unflatten(network, models), torch.randn(4, INPUTS)
    pre = preactivations(network, params, x)
    assert pre.shape == (4, 3, network.shapes[0][0])
    for j, theta in enumerate(models):
        hidden = pre[:, j].relu() if name == "one hidden" else pre[:, j]
        kept = hidden.clone()
        outputs = behind(network, params, hidden, j)
        torch.testing.assert_close(outputs, network.forward(unflatten(network, theta), x))
        assert torch.equal(hidden, kept)
