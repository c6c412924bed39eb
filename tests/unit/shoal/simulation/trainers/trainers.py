"""Networks, recipes and data that every trainer is tested on, and the comparison of two trainers' updates."""

import dataclasses

import numpy as np
import torch

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Shard
from shoal.simulation.trainers.networks import Linear, OneHidden, Softmax

INPUTS, CLASSES = 12, 3


NETWORKS = {
    "linear": Linear(INPUTS),
    "linear with bias": Linear(INPUTS, bias=True),
    "softmax": Softmax(INPUTS, CLASSES),
    "one hidden": OneHidden(INPUTS, 7, CLASSES),
}


PLAIN = LocalTraining(epochs=0, steps=4, batch_size=0, lr=0.1)


RECIPES = {
    "full batch": PLAIN,
    "full batch, decay": dataclasses.replace(PLAIN, lr_decay=0.5),
    "full batch, proximal, momentum": dataclasses.replace(PLAIN, prox_mu=0.7, momentum=0.9),
    "full batch, proximal": dataclasses.replace(PLAIN, prox_mu=0.7),
    "mini-batch": dataclasses.replace(PLAIN, epochs=3, batch_size=5, steps=0),
    "mini-batch by steps": dataclasses.replace(PLAIN, epochs=0, batch_size=5, steps=7),
    "mini-batch, proximal": dataclasses.replace(PLAIN, epochs=3, batch_size=4, prox_mu=0.5),
    "mini-batch, all of it": dataclasses.replace(PLAIN, epochs=3, batch_size=4, prox_mu=0.5, momentum=0.8),
    "batches larger than the data": dataclasses.replace(PLAIN, epochs=3, batch_size=64),
}


CLIPPED = dataclasses.replace(PLAIN, epochs=2, batch_size=5, clip=0.05, momentum=0.5, prox_mu=0.3)


SIZES = {"equal": (9, 9, 9, 9, 9), "unequal": (4, 11, 1, 9, 8)}


def shards(network, sizes, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for n in sizes:
        x = rng.standard_normal((n, INPUTS)).astype(np.float32)
        y = rng.standard_normal(n).astype(np.float32) if network.kind == "regression" else rng.integers(0, CLASSES, n)
        made.append(Shard(x, y))
    return made


def orders(count):
    return [np.random.default_rng([5, i]) for i in range(count)]


def trained(trainer, shelf, models, local, round_=3):
    count = len(shelf)
    start = np.arange(count) % len(models)
    with torch.no_grad():
        return trainer.train(models, start, shelf.block(np.arange(count)), orders(count), local, round_)


def assert_same(found, expected):
    rows = expected.rows()
    torch.testing.assert_close(found.rows(), rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms(), rows.norm(dim=1).numpy(), rtol=1e-4)
    weights = np.array([2.0, 0.5, 3.0], np.float32)
    for places in (np.array([0, 2, 4]), np.array([1, 2, 3])):
        for weight in (None, weights):
            total = torch.ones(rows.shape[1])
            found.add_to(total, places, weight)
            scale = torch.ones(3) if weight is None else torch.from_numpy(weight)
            torch.testing.assert_close(total, 1 + scale @ rows[places], rtol=1e-5, atol=1e-5)
