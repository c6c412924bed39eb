"""Batched products against the plain loop."""

import dataclasses

import numpy as np
import pytest
import torch

from shoal.errors import TaskError
from shoal.simulation.data import Shard
from shoal.simulation.trainers.batched import Batched
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Linear, Softmax, origins
from tests.helpers.trainers import CLIPPED, NETWORKS, PLAIN, RECIPES, SIZES, assert_same, shards, trained

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("local", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_it_trains_as_the_loop_does(network, local, sizes):
    """Updates, losses, norms and weighted sums agree to 1e-5 for all networks, recipes and sizes."""
    shelf = Shelf(shards(network, sizes))
    models = torch.from_numpy(origins(network, 2, 1))
    expected = trained(Loop(network), shelf, models, local)
    assert float(expected.rows().abs().max()) > 1e-3
    assert_same(trained(Batched(network), shelf, models, local), expected)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_it_clips_as_the_loop_does(network):
    """Clipping by the global norm, after the proximal term and before momentum."""
    shelf = Shelf(shards(network, SIZES["unequal"]))
    models = torch.from_numpy(origins(network, 2, 1))
    expected = trained(Loop(network), shelf, models, CLIPPED)
    assert_same(trained(Batched(network), shelf, models, CLIPPED), expected)


def test_a_step_size_that_diverges_is_an_error():
    """Losses that are no longer finite don't turn into updates."""
    network = NETWORKS["linear"]
    shelf = Shelf(shards(network, SIZES["equal"]))
    models = torch.from_numpy(origins(network, 1, 1))
    local = dataclasses.replace(PLAIN, steps=400, lr=1e4)
    with pytest.raises(TaskError, match="diverged") as caught:
        trained(Batched(network), shelf, models, local)
    assert caught.value.hint == "lower the learning rate, or set clip"


def test_a_block_of_a_large_network_holds_few_devices():
    """All parameters of a block stay below a million, and a single device is always possible."""
    assert Batched(Softmax(1, 2)).limits(1)[0] == 256
    assert Batched(Softmax(24_999, 10)).limits(1)[0] == 4
    assert Batched(Softmax(999_999, 10)).limits(5)[0] == 1


def test_devices_of_one_model_do_not_share_its_copy():
    """Two devices whose data are opposed move the model in opposite directions, and leave it alone itself."""
    network = Linear(1)
    shelf = Shelf([Shard(np.ones((1, 1), np.float32), np.array([y], np.float32)) for y in (1, -1)])
    models = torch.zeros(1, 1)
    found = trained(Batched(network), shelf, models, dataclasses.replace(PLAIN, steps=1))
    np.testing.assert_allclose(found.rows().numpy(), [[0.2], [-0.2]], rtol=1e-6)
    assert models.tolist() == [[0.0]]
