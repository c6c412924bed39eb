"""The dual form against the plain loop."""

import dataclasses

import numpy as np
import pytest
import torch

from shoal.errors import TaskError, UsageError
from shoal.simulation.trainers import dual as dual_module
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import origins
from shoal.simulation.trainers.scoring import score
from tests.helpers.trainers import CLIPPED, NETWORKS, PLAIN, RECIPES, SIZES, assert_same, orders, shards, trained

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
    dual = Dual(network, shelf)
    assert_same(trained(dual, shelf, models, local), expected)
    assert_same(trained(dual, shelf, models, local), expected)  # from kept kernels


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_clipping_is_refused(network):
    """The dual form never has the gradient, whose norm clipping needs."""
    shelf = Shelf(shards(network, SIZES["unequal"]))
    models = torch.from_numpy(origins(network, 2, 1))
    with pytest.raises(UsageError, match="the dual form can't clip gradients") as caught:
        trained(Dual(network, shelf), shelf, models, CLIPPED)
    assert caught.value.hint == "take trainer batched or auto"


def test_a_step_size_that_diverges_is_an_error():
    """Losses that are no longer finite don't turn into updates."""
    network = NETWORKS["linear"]
    shelf = Shelf(shards(network, SIZES["equal"]))
    models = torch.from_numpy(origins(network, 1, 1))
    local = dataclasses.replace(PLAIN, steps=400, lr=1e4)
    with pytest.raises(TaskError, match="diverged"):
        trained(Dual(network, shelf), shelf, models, local)


def test_more_candidates_leave_room_for_fewer_samples():
    network = NETWORKS["one hidden"]
    dual = Dual(network, Shelf(shards(network, (3,))))
    devices, one = dual.limits(1)
    assert dual.limits(4) == (devices, one // 4)
    assert dual.limits(10**9)[1] == 1


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_kernels_beyond_their_memory_are_computed_again(monkeypatch, sizes):
    """With room for one small device's kernel only, a second round gives the same updates."""
    monkeypatch.setattr(dual_module, "KERNEL_BYTES", 4 * 4 * 4)
    network = NETWORKS["one hidden"]
    shelf = Shelf(shards(network, sizes))
    models = torch.from_numpy(origins(network, 2, 1))
    dual = Dual(network, shelf)
    expected = trained(Loop(network), shelf, models, PLAIN)
    for _ in range(2):
        assert_same(trained(dual, shelf, models, PLAIN), expected)
    assert dual.kernels._left >= 0


@pytest.mark.parametrize("name", NETWORKS)
def test_scores_and_the_first_layers_outputs_are_those_of_each_model(name):
    """And training from these outputs is training from the chosen models."""
    network = NETWORKS[name]
    shelf = Shelf(shards(network, SIZES["unequal"]))
    models = torch.from_numpy(origins(network, 3, 1))
    ids = np.arange(len(shelf))
    block, dual = shelf.block(ids), Dual(network, shelf)
    with torch.no_grad():
        scored = dual.score(models, block)
        expected = score(network, models, shelf, ids).losses
        np.testing.assert_allclose(scored.losses, expected, rtol=1e-5)
        chosen = expected.argmin(1)
        recipe = (block, orders(len(shelf)), PLAIN, 2)
        plain = dual.train(models, chosen, *recipe)
        reused = dual.train(models, chosen, *recipe, scored.of(chosen))
        before = scored.pre.clone()
    torch.testing.assert_close(reused.rows(), plain.rows(), rtol=1e-5, atol=1e-6)
    assert torch.equal(scored.pre, before)
