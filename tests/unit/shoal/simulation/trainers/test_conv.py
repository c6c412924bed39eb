"""The CNN of many devices trains as the plain loop does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Shard
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.conv import BLOCK_DEVICES, Convolved
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, origins
from shoal.simulation.trainers.registry import make_trainer

RECIPE: dict[str, Any] = {
    "epochs": 2,
    "steps": 1,
    "batch_size": 4,
    "lr": 0.1,
    "lr_decay": 0.9,
    "momentum": 0.0,
    "clip": 0.0,
    "prox_mu": 0.0,
}


def trained(trainer: Any, network: Cnn, sizes: list[int], **recipe: Any) -> tuple[np.ndarray, np.ndarray]:
    """Train devices of these sizes from two models; updates (c, d) and losses (c,)."""
    rng = np.random.default_rng(3)
    pixels = network.channels * network.side**2
    shards = []
    for n in sizes:
        x = rng.random((n, pixels), np.float32)
        x[x < 0.6] = 0.0
        shards.append(Shard(x, rng.integers(0, network.classes, n)))
    block = Shelf(shards).block(np.arange(len(sizes)))
    models = torch.from_numpy(origins(network, 2, 5))
    start = np.arange(len(sizes)) % 2
    orders = [np.random.default_rng([7, i]) for i in range(len(sizes))]
    with torch.no_grad():
        done = trainer(network).train(models, start, block, orders, LocalTraining(**(RECIPE | recipe)), 3)
    return done.rows().numpy(), done.losses


@pytest.mark.parametrize(
    "network",
    [
        Cnn(side=12, classes=4, filters=(3,), dense=(6,), kernel=3),
        Cnn(side=16, classes=4, filters=(2, 3), dense=(7, 5), kernel=3),
        Cnn(channels=2, side=13, classes=3, filters=(2,), dense=(), kernel=5),
        Cnn(channels=3, side=9, classes=3, filters=(2, 4), dense=(5,), kernel=3, same=True),
        Cnn(side=28, classes=10),
    ],
    ids=["one layer", "two layers", "odd side, no hidden units", "padded", "the paper's"],
)
def test_updates_are_those_of_the_plain_loop(network: Cnn) -> None:
    """One product for a convolution and its pooling gives the same training as torch's layers."""
    expected, expected_losses = trained(Loop, network, [9, 9, 9])
    found, losses = trained(Convolved, network, [9, 9, 9])
    scale = np.abs(expected).max()
    assert scale > 1e-3
    assert np.abs(found - expected).max() < 2e-5 * scale
    assert np.allclose(losses, expected_losses, rtol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        {"momentum": 0.9},
        {"clip": 0.05},
        {"prox_mu": 0.5},
        {"batch_size": 0, "epochs": 0, "steps": 3},
        {"batch_size": 4, "epochs": 0, "steps": 3},
    ],
    ids=lambda recipe: ", ".join(recipe),
)
def test_every_recipe_is_the_loops(recipe: dict[str, Any]) -> None:
    """Padding, shorter devices, momentum, clipping and the proximal term all count as on a device."""
    network = Cnn(side=12, classes=4, filters=(3,), dense=(6,), kernel=3)
    expected, expected_losses = trained(Loop, network, [5, 9, 3, 8], **recipe)
    found, losses = trained(Convolved, network, [5, 9, 3, 8], **recipe)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    assert np.allclose(losses, expected_losses, rtol=1e-5)


def test_memory_is_used_again() -> None:
    """A trainer keeps the memory of a step; blocks of more or fewer devices and samples in between change no update."""
    network = Cnn(side=12, classes=4, filters=(3, 2), dense=(6,), kernel=3)
    kept = Convolved(network)
    for sizes in ([5, 9, 3, 8], [4, 4], [5, 9, 3, 8], [1, 6, 2]):
        expected, _ = trained(Loop, network, sizes)
        found, _ = trained(lambda _network: kept, network, sizes)
        assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def test_ties_of_pixels_go_to_the_first() -> None:
    """In an even image all four places tie; as in torch, the first one alone gets the gradient."""
    network = Cnn(side=8, classes=2, filters=(2,), dense=(), kernel=3)
    shard = Shard(np.full((4, 64), 0.5, np.float32), np.array([0, 1, 1, 0]))
    models = torch.from_numpy(origins(network, 1, 1))
    updates = []
    for trainer in (Loop(network), Convolved(network)):
        with torch.no_grad():
            done = trainer.train(
                models,
                np.zeros(1, np.int64),
                Shelf([shard]).block(np.arange(1)),
                [np.random.default_rng(0)],
                LocalTraining(**RECIPE),
                1,
            )
        updates.append(done.rows().numpy())
    assert np.allclose(updates[0], updates[1], atol=1e-6)


def test_cnn_gets_this_trainer() -> None:
    """The fastest trainer is chosen unasked; a block's patches stay small."""
    shelf = Shelf([Shard(np.zeros((2, 784), np.float32), np.zeros(2, np.int64))])
    trainer = make_trainer("auto", Cnn(), shelf)
    assert isinstance(trainer, Convolved)
    assert trainer.limits(1, LocalTraining(**RECIPE)).devices == BLOCK_DEVICES
