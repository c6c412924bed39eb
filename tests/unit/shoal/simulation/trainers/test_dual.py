"""The dual form against the plain loop, and the choice between it and batched products."""

import dataclasses

import numpy as np
import pytest
import torch

from shoal.errors import TaskError, UsageError
from shoal.simulation.data import Shard
from shoal.simulation.trainers import dual as dual_module
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Softmax, origins
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
    dual = Dual(network, shelf, always=True)
    assert_same(trained(dual, shelf, models, local), expected)
    assert_same(trained(dual, shelf, models, local), expected)  # from kept kernels


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_clipping_is_left_to_batched_products(network):
    """The dual form never has the gradient, whose norm clipping needs."""
    shelf = Shelf(shards(network, SIZES["unequal"]))
    models = torch.from_numpy(origins(network, 2, 1))
    expected = trained(Loop(network), shelf, models, CLIPPED)
    assert_same(trained(Dual(network, shelf), shelf, models, CLIPPED), expected)
    with pytest.raises(UsageError, match="the dual form can't clip gradients") as caught:
        trained(Dual(network, shelf, always=True), shelf, models, CLIPPED)
    assert caught.value.hint == "take trainer batched or auto"


def test_a_step_size_that_diverges_is_an_error():
    """Losses that are no longer finite don't turn into updates."""
    network = NETWORKS["linear"]
    shelf = Shelf(shards(network, SIZES["equal"]))
    models = torch.from_numpy(origins(network, 1, 1))
    local = dataclasses.replace(PLAIN, steps=400, lr=1e4)
    with pytest.raises(TaskError, match="diverged"):
        trained(Dual(network, shelf, always=True), shelf, models, local)


def suited(local, samples=5, inputs=12):
    shelf = Shelf([Shard(np.zeros((samples, inputs), np.float32), np.zeros(samples, np.int64))])
    dual = Dual(Softmax(inputs, 3), shelf)
    return dual.suits(shelf.block(np.array([0])), local)


@pytest.mark.parametrize(
    ("changes", "samples", "expected"),
    [
        ({"steps": 3}, 5, True),
        ({"steps": 2}, 5, False),
        ({"steps": 3}, 12, True),
        ({"steps": 3}, 13, False),
        ({"epochs": 3, "batch_size": 2}, 5, True),
        ({"epochs": 2, "batch_size": 2}, 5, False),
        ({"steps": 6, "batch_size": 5}, 10, True),
        ({"steps": 5, "batch_size": 5}, 10, False),
        ({"steps": 9, "clip": 1.0}, 5, False),
    ],
)
def test_the_form_is_taken_from_three_visits_of_few_samples_on(changes, samples, expected):
    """Twelve inputs; a sample is visited once a full-batch step, or once a pass of mini-batches."""
    assert suited(dataclasses.replace(PLAIN, **changes), samples) is expected


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
    dual = Dual(network, shelf, always=True)
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
    block, dual = shelf.block(ids), Dual(network, shelf, always=True)
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
