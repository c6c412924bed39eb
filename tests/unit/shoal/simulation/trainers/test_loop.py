"""The reference trainer: it trains as the code of a real device does."""

import dataclasses

import numpy as np
import pytest
import torch

from edge_client.learning.data import Dataset
from edge_client.learning.training import train
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Shard
from shoal.simulation.trainers.blocks import DivergedError, Shelf
from shoal.simulation.trainers.loop import Loop, train_one
from shoal.simulation.trainers.networks import Linear, origins, sample_losses, unflatten
from tests.unit.shoal.simulation.trainers.trainers import (
    CLIPPED,
    NETWORKS,
    PLAIN,
    RECIPES,
    SIZES,
    orders,
    shards,
    trained,
)

pytestmark = pytest.mark.torch


class TorchBackend:
    """A task's loss and gradient by autograd, in place of ONNX Runtime's."""

    def __init__(self, network):
        self.network = network

    def grad(self, theta, x, y):
        with torch.enable_grad():
            leaf = torch.from_numpy(theta.copy()).requires_grad_()
            outputs = self.network.forward(unflatten(self.network, leaf), torch.from_numpy(x))
            loss = sample_losses(self.network.kind, outputs, torch.from_numpy(y))[0].mean()
            (gradient,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), gradient.numpy().copy()


@pytest.mark.parametrize("local", [*RECIPES.values(), CLIPPED], ids=[*RECIPES, "clipped"])
def test_loop_trains_as_a_device_does(local):
    """`training.train` with the same gradients gives the same update: decay, prox, clip, momentum, batches."""
    network = NETWORKS["one hidden"]
    data = shards(network, SIZES["unequal"])
    shelf = Shelf(data)
    models = torch.from_numpy(origins(network, 1, 1))
    expected = trained(Loop(network), shelf, models, local, round_=3)
    settings = LocalTraining(**{f.name: getattr(local, f.name) for f in dataclasses.fields(LocalTraining)})
    for i, shard in enumerate(data):
        device = train(
            models[0].numpy(),
            Dataset(shard.x, shard.y),
            settings,
            TorchBackend(network),
            orders(len(data))[i],
            2,
            lambda: False,
        )
        np.testing.assert_allclose(expected.rows()[i].numpy(), device.delta, rtol=1e-4, atol=1e-6)
        assert expected.losses[i] == pytest.approx(device.mean_loss, rel=1e-5)


def test_one_step_of_a_hand_made_regression():
    """Y = w x on x = 1, 2 and y = 3, 0 from w = 1: errors -2 and 2, mean loss 4, gradient (2 (-2) 1 + 2 (2) 2) / 2 = 2."""
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 0.0])
    update = torch.tensor([1.0])
    loss = train_one(Linear(1), update, x, y, None, dataclasses.replace(PLAIN, steps=1), 1)
    assert update.tolist() == pytest.approx([-0.2])
    assert loss == pytest.approx(4.0)


def test_loss_is_the_mean_over_samples():
    """Batches of 2 and 1 of three samples weigh two thirds and one third; a zero step size leaves the model alone."""
    x, y = torch.tensor([[0.0], [0.0], [0.0]]), torch.tensor([3.0, 0.0, 0.0])
    local = dataclasses.replace(PLAIN, epochs=1, batch_size=2, lr=1e-30)
    for seed in range(4):
        update = torch.ones(1)
        loss = train_one(Linear(1), update, x, y, np.random.default_rng(seed), local, 1)
        assert loss == pytest.approx(3.0)
        assert update.tolist() == [0.0]


def test_overflowing_update_is_refused():
    """The last step's result is in no loss."""
    x, y = torch.tensor([[1e33]]), torch.tensor([1.0])
    local = dataclasses.replace(PLAIN, steps=1, lr=1e6)
    assert np.isnan(train_one(Linear(1), torch.zeros(1), x, y, None, local, 1))
    shelf = Shelf([Shard(x.numpy() * scale, y.numpy()) for scale in (0, 1, 0)])
    with pytest.raises(DivergedError, match="a simulated device's training diverged") as caught:
        trained(Loop(Linear(1)), shelf, torch.zeros(1, 1), local)
    assert caught.value.hint == "lower the learning rate, or set clip"
    assert caught.value.rows.tolist() == [1]


def test_first_model_and_padding_are_left():
    """Two devices from one model; the padding of the shorter one is not trained on."""
    shelf = Shelf([Shard(np.ones((n, 1), np.float32), np.full(n, 2.0, np.float32)) for n in (1, 3)])
    models = torch.zeros(1, 1)
    found = trained(Loop(Linear(1)), shelf, models, dataclasses.replace(PLAIN, steps=1))
    assert models.tolist() == [[0.0]]
    np.testing.assert_allclose(found.rows().numpy(), [[0.4], [0.4]], rtol=1e-6)
    assert found.losses.tolist() == [4.0, 4.0]
