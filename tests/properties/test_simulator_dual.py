"""For any sizes and recipe, dense networks are trained as by autograd, device by device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Shard
from shoal.simulation.trainers.blocks import Limits, Shelf
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import OneHidden, Softmax, origins

pytestmark = pytest.mark.torch

recipes = st.builds(
    LocalTraining,
    epochs=st.integers(0, 3),
    steps=st.integers(1, 4),
    batch_size=st.integers(0, 6),
    lr=st.floats(0.01, 0.3),
    lr_decay=st.floats(0.5, 1.0),
    momentum=st.sampled_from([0.0, 0.0, 0.9]),
    clip=st.sampled_from([0.0, 0.0, 0.2]),
    prox_mu=st.sampled_from([0.0, 0.0, 0.5]),
)


@settings(max_examples=40, deadline=None)
@given(
    recipe=recipes,
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    hidden=st.integers(0, 5),
    inputs=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_dense_trainer_agrees_with_the_loop(recipe, sizes, hidden, inputs, seed):
    """Updates and visited losses to 1e-5, with more samples than inputs and with fewer, clipped or not."""
    rng = np.random.default_rng(seed)
    network = OneHidden(inputs, hidden, 3) if hidden else Softmax(inputs, 3)
    shelf = Shelf([Shard(rng.standard_normal((n, inputs)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes])
    models = torch.from_numpy(origins(network, 2, seed))
    start = rng.integers(0, 2, len(sizes))
    block = shelf.block(np.arange(len(sizes)))

    def work(trainer):
        with torch.no_grad():
            orders = [np.random.default_rng([seed, i]) for i in range(len(sizes))]
            return trainer.train(models, start, block, orders, recipe, 2)

    expected = work(Loop(network))
    found = work(Dual(network, shelf))
    torch.testing.assert_close(found.rows(), expected.rows(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=40),
    devices=st.integers(1, 12),
    samples=st.integers(1, 2000),
    edge=st.integers(0, 500),
)
def test_blocks_are_a_partition(sizes, devices, samples, edge):
    """Every device is in one block, on one side of the edge, and within the limits unless a single device breaks them."""
    shelf = Shelf([Shard(np.zeros((n, 1), np.float32), np.zeros(n, np.int64)) for n in sizes])
    parts = shelf.parts(np.arange(len(sizes)), Limits(devices, samples, edge))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(sizes)))
    for part in parts:
        assert len(part) <= devices
        assert len(set(shelf.sizes[part] > edge)) == 1
        assert len(part) == 1 or len(part) * shelf.sizes[part].max() <= samples
        assert shelf.sizes[part].max() <= 2 * max(shelf.sizes[part].min(), 8)
