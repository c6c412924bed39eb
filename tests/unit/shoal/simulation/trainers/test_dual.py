"""The trainer of dense networks, in both forms of the first layer, against the plain loop."""

import dataclasses

import numpy as np
import pytest
import torch

from shoal.errors import TaskError
from shoal.simulation.data import Shard
from shoal.simulation.trainers import dual as dual_module
from shoal.simulation.trainers.blocks import Rows, Shelf
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Linear, Softmax, origins
from shoal.simulation.trainers.scoring import score
from tests.unit.shoal.simulation.trainers.trainers import (
    CLIPPED,
    INPUTS,
    NETWORKS,
    PLAIN,
    RECIPES,
    SIZES,
    assert_same,
    orders,
    shards,
    trained,
)

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


@pytest.mark.parametrize("sizes", [(9, 13, 4, 40, 31), (20, 20, 20, 20, 20)])
@pytest.mark.parametrize("local", [*RECIPES.values(), CLIPPED], ids=[*RECIPES, "clipped"])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_weights_move_without_a_kernel(network, local, sizes):
    """They have no kernel, and train as the loop does."""
    shelf = Shelf(shards(network, sizes))
    models = torch.from_numpy(origins(network, 2, 1))
    dual = Dual(network, shelf)
    found = trained(dual, shelf, models, local)
    assert isinstance(found, Rows)
    assert not dual.kernels._own
    assert_same(found, trained(Loop(network), shelf, models, local))


def test_kernel_is_no_larger_than_samples():
    """And each device is on one side of this edge, whoever else is in the round."""
    network = NETWORKS["softmax"]
    shelf = Shelf(shards(network, (INPUTS, INPUTS + 1, 1)))
    dual, ids = Dual(network, shelf), np.arange(3)
    parts = shelf.parts(ids, dual.limits(1, PLAIN))
    assert [part.tolist() for part in parts] == [[1], [0, 2]]
    assert [dual.spans(shelf.block(part), PLAIN) for part in parts] == [False, True]
    assert not dual.spans(shelf.block(ids[:1]), CLIPPED)


def test_mini_batches_share_a_block():
    """Padding costs them nothing, but full batches and kernels would compute with it; a block's inputs stay below 256 MB."""
    network, ids = NETWORKS["softmax"], np.arange(5)
    shelf = Shelf(shards(network, (1, 400, 13, 12, 90)))
    dual = Dual(network, shelf)
    for recipe, expected in (
        (RECIPES["mini-batch"], [[1, 4, 2], [3, 0]]),
        (PLAIN, [[1], [4], [2], [3, 0]]),
        (CLIPPED, [[1, 4, 2, 3, 0]]),
    ):
        assert [part.tolist() for part in shelf.parts(ids, dual.limits(1, recipe))] == expected
    assert Dual(Linear(1_000_000), Shelf(shards(network, (3,)))).limits(1, PLAIN).samples == 64


def test_devices_share_no_copy():
    """Two devices whose data are opposed move the model in opposite directions, and leave it alone itself."""
    network = Linear(1)
    shelf = Shelf([Shard(np.ones((2, 1), np.float32), np.full(2, y, np.float32)) for y in (1, -1)])
    models = torch.zeros(1, 1)
    found = trained(Dual(network, shelf), shelf, models, dataclasses.replace(PLAIN, steps=1))
    np.testing.assert_allclose(found.rows().numpy(), [[0.2], [-0.2]], rtol=1e-6)
    assert models.tolist() == [[0.0]]


def test_step_size_that_diverges_is_an_error():
    """Losses that are no longer finite don't turn into updates."""
    network = NETWORKS["linear"]
    shelf = Shelf(shards(network, SIZES["equal"]))
    models = torch.from_numpy(origins(network, 1, 1))
    local = dataclasses.replace(PLAIN, steps=400, lr=1e4)
    with pytest.raises(TaskError, match="diverged") as caught:
        trained(Dual(network, shelf), shelf, models, local)
    assert caught.value.hint == "lower the learning rate, or set clip"


def test_candidates_leave_room_for_fewer():
    """More candidates leave room for fewer samples."""
    network = NETWORKS["one hidden"]
    dual = Dual(network, Shelf(shards(network, (3,))))
    one = dual.limits(1, PLAIN)
    assert dual.limits(4, PLAIN) == dataclasses.replace(one, samples=one.samples // 4)
    assert dual.limits(10**9, PLAIN).samples == 1


def test_large_network_takes_few_devices():
    """The updates of a block stay below 16 million numbers, and a single device is always possible."""
    shelf = Shelf(shards(NETWORKS["softmax"], (3,)))
    found = [Dual(Softmax(inputs, 10), shelf).limits(1, PLAIN).devices for inputs in (1, 99_999, 1_999_999)]
    assert found == [128, 16, 1]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_large_kernels_are_computed_again(monkeypatch, sizes):
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
def test_scores_are_those_of_each_model(name):
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
