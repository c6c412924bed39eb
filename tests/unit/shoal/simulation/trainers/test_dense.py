"""Batched passes of linear layers: factors of the gradient against autograd, and the recipe of a step."""

import dataclasses

import pytest
import torch

from shoal.simulation.trainers.dense import Descent, copies, errors, first_layer, has_bias, is_dense
from shoal.simulation.trainers.networks import Cnn, Linear, Lstm, OneHidden, Softmax
from tests.unit.shoal.simulation.trainers.trainers import CLASSES, INPUTS, NETWORKS, PLAIN

pytestmark = pytest.mark.torch


def test_dense_means_linear_layers_alone():
    """Dense networks are those of linear layers alone."""
    assert all(is_dense(network) for network in NETWORKS.values())
    assert not any(is_dense(network) for network in (Cnn(), Lstm(5, 3, 3, 1)))
    assert [has_bias(n) for n in (Linear(3), Linear(3, bias=True), Softmax(3, 2), OneHidden(3, 2, 2))] == [
        False,
        True,
        True,
        True,
    ]


def test_copies_are_the_devices_own():
    theirs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    (made,) = copies([theirs], torch.tensor([1, 1, 0]))
    assert made.tolist() == [[3, 4], [3, 4], [1, 2]]
    made[0, 0] = 9
    assert made[1, 0] == theirs[1, 0] == 3


@pytest.mark.parametrize("name", NETWORKS)
def test_factors_give_autograds_gradient(name):
    """A^T B is a weight's gradient and the sum of A its bias's; a sample of weight 0 counts in neither, nor as a loss."""
    network = NETWORKS[name]
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(2, *shape, generator=generator) for shape in network.shapes]
    x = torch.randn(2, 5, INPUTS, generator=generator)
    w = torch.tensor([[0.2] * 5, [0.5, 0.5, 0, 0, 0]])
    y = torch.randint(0, CLASSES, (2, 5), generator=generator)
    y = y.float() if network.kind == "regression" else y
    bias = has_bias(network)
    pre = first_layer(params, x, bias=bias)
    kept = pre.clone()
    factors, below, losses = errors(network, params[2:] if bias else params[1:], pre, y, w)
    assert torch.equal(pre, kept)
    found = []
    for error, inputs in [(below, x), *factors]:
        found.append(error.transpose(1, 2) @ inputs)
        if bias:
            found.append(error.sum(1))
    for device in range(2):
        leaves = [p[device].clone().requires_grad_() for p in params]
        each = network.losses(network.forward(leaves, x[device]), y[device])[0]
        expected = torch.autograd.grad((each * w[device]).sum(), leaves)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine[device], theirs.view_as(mine[device]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(losses[device], (each * (w[device] > 0)).detach(), rtol=1e-5, atol=1e-6)


def descent(**changes):
    """Return the descent of two devices with one weight of 1 and one bias of 1, step size 0.1."""
    params = [torch.ones(2, 1, 1), torch.ones(2, 1)]
    return Descent(params, 0.1, dataclasses.replace(PLAIN, **changes))


def step(made, a=2, gradient=2.0):
    """Step ``a`` devices with this gradient of the weight and of the bias."""
    made.step([(torch.full((a, 1, 1), gradient), torch.ones(a, 1, 1))], a)


def test_plain_step_moves_active_devices():
    """A plain step goes against the gradient of the active devices alone."""
    made = descent()
    step(made, a=1)
    assert [p.flatten().tolist() for p in made.params] == [pytest.approx([0.8, 1.0])] * 2
    assert [c.flatten().tolist() for c in made.changes()] == [pytest.approx([-0.2, 0.0])] * 2


@pytest.mark.parametrize(
    ("changes", "steps", "moved"),
    [
        # The second step's pull is mu times the distance of the first: 0.1 (2 - 0.5 * 0.2) = 0.19.
        ({"prox_mu": 0.5}, 2, 0.39),
        # The first step is clipped alone; in the second the pull is part of the gradient that is clipped to length 1.
        ({"prox_mu": 0.5, "clip": 1.0}, 2, 0.2 / 2**0.5),
        # By the norm over all parameters; clipping shortens only.
        ({"clip": 1.0}, 1, 0.1 / 2**0.5),
        ({"clip": 9.0}, 1, 0.2),
        # Steps of 0.2 and 0.2 + 0.5 * 0.2, added up after clipping.
        ({"momentum": 0.5}, 2, 0.5),
        ({"momentum": 0.5, "clip": 1.0}, 2, 0.25 / 2**0.5),
    ],
)
def test_recipe_of_a_step(changes, steps, moved):
    made = descent(**changes)
    for _ in range(steps):
        step(made)
    assert [c.flatten().tolist() for c in made.changes()] == [pytest.approx([-moved] * 2)] * 2
    assert [p.flatten().tolist() for p in made.params] == [pytest.approx([1 - moved] * 2)] * 2
