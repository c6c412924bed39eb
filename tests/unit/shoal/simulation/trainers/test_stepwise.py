"""The trainer that takes devices one after another: both of its forms against the plain loop."""

import numpy as np
import pytest
import torch

from shoal.errors import TaskError, UsageError
from shoal.protocol.documents import LocalSettings
from shoal.simulation.data import Shard
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Linear, Lstm, OneHidden, Softmax, origins
from shoal.simulation.trainers.registry import make_trainers
from shoal.simulation.trainers.stepwise import Stepwise

SIZES = (3, 10, 17, 31)
NETWORKS = (Softmax(12, 4), OneHidden(12, 6, 4))


def shelf_of(sizes=SIZES, scale=1.0):
    rng = np.random.default_rng(5)
    return Shelf(
        [
            Shard((scale * rng.standard_normal((n, 12))).astype(np.float32), rng.integers(0, 4, n).astype(np.int64))
            for n in sizes
        ]
    )


def recipe(*, epochs=0, steps=0, batch_size=4, lr=0.1, momentum=0.0, clip=0.0, prox_mu=0.0):
    return LocalSettings(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        lr_decay=0.9,
        momentum=momentum,
        clip=clip,
        prox_mu=prox_mu,
    )


def trained(trainer, network, local, shelf=None):
    shelf = shelf or shelf_of()
    models = torch.from_numpy(origins(network, 2, 1))
    ids = np.arange(len(shelf))
    orders = [np.random.default_rng(i) for i in ids]
    with torch.no_grad():
        return trainer.train(models, ids % 2, shelf.block(ids), orders, local, 3)


RECIPES = {
    "epochs": recipe(epochs=3),
    "steps that end within a pass": recipe(steps=7),
    "fewer steps than one pass": recipe(steps=1),
    "proximal": recipe(epochs=2, prox_mu=0.7),
    "one batch": recipe(epochs=4, batch_size=100),
    "full batch": recipe(steps=5, batch_size=0),
    "momentum": recipe(epochs=2, momentum=0.8),
    "clip": recipe(epochs=2, clip=0.05),
}


@pytest.mark.parametrize("form", ["weights", "kernel", "auto"])
@pytest.mark.parametrize("network", NETWORKS, ids=["softmax", "hidden"])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_plain_loop(network, name, form):
    local = RECIPES[name]
    ours, plain = trained(Stepwise(network, form), network, local), trained(Loop(network), network, local)
    torch.testing.assert_close(ours.rows(), plain.rows(), atol=2e-6, rtol=1e-4)
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=1e-4)


def test_kernels_are_kept_between_rounds_within_their_budget():
    network, shelf = NETWORKS[0], shelf_of()
    trainer = Stepwise(network, "kernel")
    trainer._kernels.left = 4 * (3**2 + 10**2 + 1)
    first = trained(trainer, network, recipe(epochs=2), shelf).rows()
    assert set(trainer._kernels.own) == {0, 1}
    torch.testing.assert_close(trained(trainer, network, recipe(epochs=2), shelf).rows(), first, atol=0, rtol=0)


@pytest.mark.parametrize("form", ["weights", "kernel"])
def test_a_loss_that_overflows_is_reported(form):
    with pytest.raises(TaskError, match="diverged"):
        trained(Stepwise(NETWORKS[1], form), NETWORKS[1], recipe(epochs=9, lr=1e20), shelf_of(scale=1e6))


def test_it_is_chosen_by_name_and_only_where_it_can():
    shelf = shelf_of()
    work = np.arange(len(shelf)), recipe()
    assert isinstance(make_trainers("stepwise", NETWORKS[0], shelf).trainer(*work), Stepwise)
    assert not isinstance(make_trainers("stepwise", Linear(12), shelf).trainer(*work), Stepwise)
    for network in (Lstm(5, 3, 3, 1), Cnn(1, 8, 4, (2,), (3,), 3)):
        with pytest.raises(UsageError, match="stepwise"):
            make_trainers("stepwise", network, shelf)
