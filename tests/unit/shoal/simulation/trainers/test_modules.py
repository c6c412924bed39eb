"""Torch modules as networks: parameters by name, shapes of outputs, and losses of each sample."""

import pytest
import torch
from torch import nn

from shoal.simulation.trainers.modules import SHORT, ModuleNetwork, attend, packed
from shoal.simulation.trainers.networks import sample_losses, unflatten
from shoal.task.manifest import Parameter

pytestmark = pytest.mark.torch


def network_of(module, kind="classification", **rest):
    layout = [Parameter(name, tuple(p.shape), "cluster") for name, p in module.named_parameters()]
    return ModuleNetwork(module, layout, kind, **rest)


def test_outputs_follow_the_parameters():
    """The template's own values are neither used nor changed."""
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    network = network_of(module)
    assert network.shapes == ((2, 3), (2,))
    assert network.length == 8
    weight, x = torch.randn(2, 3), torch.randn(4, 3)
    found = network.forward([weight, torch.ones(2)], x)
    torch.testing.assert_close(found, x @ weight.T + 1)
    assert torch.equal(module.weight, before)
    assert network.module() is module


def test_parameters_follow_the_layout():
    """Parameters follow the layout and not the module."""
    module = nn.Linear(2, 2)
    layout = [Parameter("bias", (2,), "cluster"), Parameter("weight", (2, 2), "cluster")]
    network = ModuleNetwork(module, layout, "classification")
    found = network.forward([torch.tensor([5.0, 7.0]), torch.zeros(2, 2)], torch.ones(1, 2))
    assert found.tolist() == [[5, 7]]


def test_scalar_parameter_arrives_as_scalar():
    """Theta's part of it has shape (1,)."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            assert self.scale.dim() == 0
            return x * self.scale

    assert network_of(Scaled()).forward([torch.tensor([3.0])], torch.ones(1, 2)).tolist() == [[3, 3]]


def test_regression_has_the_targets_shape():
    """nn.Linear(n, 1) gives (n, 1) and y is (n,): broadcast together they would be n by n losses."""
    network = network_of(nn.Linear(3, 1), "regression")
    params = [torch.ones(1, 3), torch.zeros(1)]
    outputs = network.forward(params, torch.tensor([[1.0, 0, 0], [1, 1, 1]]))
    assert outputs.tolist() == [1, 3]
    losses, right = network.losses(outputs, torch.tensor([0.0, 0.0]))
    assert losses.tolist() == [1, 9]
    assert right.tolist() == [0, 0]


def test_several_targets_have_a_mean_loss():
    """A loss of several targets is their mean."""
    network = network_of(nn.Linear(3, 2), "regression", label_shape=(2,))
    losses, _ = network.losses(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2))
    assert losses.tolist() == [5]


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu", "bias": False}], ids=str)
@pytest.mark.parametrize("length", [5, SHORT + 1])
def test_transformer_trains_as_by_autograd(options, length):
    """The gradients are those of the module's own forward, and its own parameters return afterwards."""
    torch.manual_seed(1)
    body = nn.TransformerEncoderLayer(16, 4, 8, dropout=0.0, batch_first=True, **options)
    module = nn.Sequential(nn.Linear(3, 16), body, nn.Flatten(), nn.Linear(16 * length, 2))
    network, before = network_of(module), [p.clone() for p in module.parameters()]
    theta = torch.cat([p.detach().flatten() for p in module.parameters()]) * 1.1
    x, y = torch.randn(6, length, 3), torch.randint(0, 2, (6,))
    leaves = [p.requires_grad_() for p in unflatten(network, theta.clone())]
    for rows in (slice(0, 4), slice(2, 6), slice(4, 6)):
        with torch.enable_grad():
            expected = network.mean_loss(network.forward(leaves, x[rows]), y[rows])
            slopes = torch.autograd.grad(expected, leaves)
        with network.bound(theta) as (params, gradients):
            loss, found = gradients(x[rows], y[rows])
            assert all(p.data_ptr() >= theta.data_ptr() for p in params)
        torch.testing.assert_close(loss, expected.detach())
        for mine, theirs in zip(found, slopes, strict=True):
            torch.testing.assert_close(mine.flatten(), theirs.flatten(), rtol=1e-4, atol=1e-6)
    assert "forward" not in vars(body.self_attn)
    for mine, theirs in zip(module.parameters(), before, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", ["weights", "mask", "padding", "other", "causal", "sequence first"])
def test_other_attention_is_the_layers_own(case):
    """`attend` has its own way for one form, and leaves the others to torch."""
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(8, 2, batch_first=case != "sequence first")
    assert packed(layer) == (case != "sequence first")
    x = torch.randn(3, 5, 8)
    key = torch.randn(3, 5, 8) if case == "other" else x
    options = {"need_weights": case == "weights"}
    if case in ("mask", "causal"):
        options["attn_mask"] = nn.Transformer.generate_square_subsequent_mask(5)
    if case == "padding":
        options["key_padding_mask"] = torch.arange(5).repeat(3, 1) > 3
    options["is_causal"] = case == "causal"
    expected, weights = layer(x, key, key, **options)
    if case != "sequence first":
        found, mine = attend(layer, x, key, key, **options)
        torch.testing.assert_close(found, expected)
        assert (mine is None) == (weights is None)


@pytest.mark.parametrize("kind", ["classification", "sequence"])
def test_kind_without_loss_has_the_built_in(kind):
    """A kind without a loss of its own has the built in one."""
    shape = (4, 3) if kind == "classification" else (4, 5, 3)
    outputs, y = torch.randn(shape), torch.randint(0, 3, shape[:-1])
    found = network_of(nn.Linear(2, 3), kind).losses(outputs, y)
    for mine, theirs in zip(found, sample_losses(kind, outputs, y), strict=True):
        assert torch.equal(mine, theirs)


def test_given_loss_is_by_sample():
    """Scoring needs no mean over samples; right labels are counted as without it."""
    network = network_of(nn.Linear(2, 2), loss=lambda o, y: 10 * nn.functional.cross_entropy(o, y))
    outputs, y = torch.tensor([[0.0, 0.0], [0.0, 50.0]]), torch.tensor([1, 1])
    losses, right = network.losses(outputs, y)
    assert losses.tolist() == pytest.approx([6.931472, 0.0])
    assert right.tolist() == [0, 1]
    absolute = network_of(nn.Linear(2, 1), "regression", loss=lambda o, y: (o - y).abs().mean())
    losses, right = absolute.losses(torch.tensor([1.0, -4.0]), torch.zeros(2))
    assert losses.tolist() == [1, 4]
    assert right.tolist() == [0, 0]
