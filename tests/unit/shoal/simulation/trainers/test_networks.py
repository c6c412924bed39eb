"""Networks against their torch modules: order of parameters, outputs, losses and initial weights."""

import math

import numpy as np
import pytest
import torch

from shoal.errors import TaskError
from shoal.simulation.trainers.networks import (
    Cnn,
    Linear,
    Lstm,
    OneHidden,
    Softmax,
    origins,
    sample_losses,
    tensor,
    unflatten,
)
from tests.unit.shoal.simulation.trainers.trainers import INPUTS, NETWORKS

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "network",
    [
        *NETWORKS.values(),
        Cnn(side=16, filters=(2, 3), dense=(9,), kernel=3),
        Cnn(channels=2, side=8, filters=(3,), dense=(), kernel=5, same=True),
        Lstm(11, 4, 5, 2),
    ],
    ids=lambda n: type(n).__name__,
)
def test_networks_agree_with_their_modules(network):
    """Weights in the order of the module's parameters gives the module's own outputs; the seed decides the weights."""
    theta = network.init(3)
    assert theta.shape == (network.length,)
    assert theta.dtype == np.float32
    np.testing.assert_array_equal(theta, network.init(3))
    assert not np.array_equal(theta, network.init(4))
    torch.manual_seed(3)
    module = network.module()
    assert tuple(tuple(p.shape) for p in module.parameters()) == network.shapes
    generator = torch.Generator().manual_seed(0)
    if isinstance(network, Lstm):
        x = torch.randint(0, 11, (4, 6), generator=generator)
    elif isinstance(network, Cnn):
        x = torch.randn(4, network.channels * network.side**2, generator=generator)
    else:
        x = torch.randn(4, INPUTS, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(network.forward(unflatten(network, torch.from_numpy(theta)), x), module(x))


def test_origins_follow_the_seed():
    """The k starting models for IFCA."""
    network = NETWORKS["softmax"]
    models = origins(network, 3, 5)
    np.testing.assert_array_equal(models, origins(network, 3, 5))
    assert len({m.tobytes() for m in models}) == 3


@pytest.mark.parametrize("seed", [0, 1])
def test_torchs_generator_is_left_alone(seed):
    """Initial weights leave torchs generator alone."""
    torch.manual_seed(seed)
    expected = torch.rand(1)
    torch.manual_seed(seed)
    NETWORKS["one hidden"].init(99)
    assert torch.equal(torch.rand(1), expected)


def test_lengths_are_the_papers():
    """Lengths are those of the papers networks."""
    networks = (Linear(10), Linear(10, bias=True), Softmax(784, 10), OneHidden(784, 128, 10), Cnn())
    assert [network.length for network in networks] == [10, 11, 7850, 101_770, 44_426]


def test_convolutions_need_a_pixel():
    """A side of 8 is 2 after one convolution of 5 and a pooling; padding would halve it only."""
    assert Cnn(side=8, filters=(3,)).flat == 3 * 2 * 2
    assert Cnn(side=8, filters=(3, 5), same=True).flat == 5 * 2 * 2
    with pytest.raises(TaskError, match="2 convolutions leave nothing of a side of 8"):
        _ = Cnn(side=8, filters=(3, 5)).shapes


def test_parameters_are_views_of_theta():
    """One model and k models; a change of a parameter is one of theta."""
    network = OneHidden(2, 3, 4)
    theta = torch.arange(2.0 * network.length).view(2, -1)
    w1, b1, w2, b2 = unflatten(network, theta)
    assert [tuple(p.shape) for p in (w1, b1, w2, b2)] == [(2, 3, 2), (2, 3), (2, 4, 3), (2, 4)]
    assert w1[0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert b1[0].tolist() == [6, 7, 8]
    b2[1, 3] = -1
    assert theta[1, -1] == -1
    assert [tuple(p.shape) for p in unflatten(network, theta[0])] == list(network.shapes)


@pytest.mark.parametrize(
    ("kind", "outputs", "y", "losses", "right"),
    [
        # Ties go to the first.
        ("classification", [[0.0, 0.0], [0.0, 3.0]], [1, 1], [math.log(2), math.log(1 + math.exp(-3))], [0, 1]),
        (
            "sequence",
            [[[9.0, 0.0], [0.0, 0.0], [0.0, 9.0]]],
            [[0, 1, 1]],
            [(2 * math.log(1 + math.exp(-9)) + math.log(2)) / 3],
            [2],
        ),
        ("regression", [1.0, 2.0], [1.0, 5.0], [0, 9], [0, 0]),
    ],
)
def test_losses_of_samples(kind, outputs, y, losses, right):
    """Cross entropy of classes, its mean over the positions of a sequence, and squared errors without right answers."""
    found, counted = sample_losses(kind, torch.tensor(outputs), torch.tensor(y))
    assert found.tolist() == pytest.approx(losses)
    assert counted.tolist() == right


def test_tensors_share_memory():
    """Tensors share memory unless the array is read only."""
    values = np.zeros(3, np.float32)
    tensor(values)[0] = 1
    assert values[0] == 1
    values.flags.writeable = False
    tensor(values)[1] = 1
    assert values[1] == 0
