"""A module as a function of one vector: outputs, loss, gradient and correct labels at any parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.owner.task_compiler import compile as compile_
from shoal.owner.task_compiler.builtin import cross_entropy
from shoal.owner.task_compiler.flat import FlatModel, flatten
from shoal.task.manifest import Parameter

pytestmark = pytest.mark.torch
LAYOUT = (
    Parameter("scale", (), "shared"),
    Parameter("fc.bias", (3,), "cluster"),
    Parameter("fc.weight", (3, 4), "cluster"),
)
"""Another order than the module's own."""


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.fc(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Scaled()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])


def test_vector_is_in_order_of_the_layout(model):
    """A copy of the parameters in the order of the layout."""
    theta = flatten(model, LAYOUT)
    assert theta.dtype == torch.float32
    assert theta.tolist() == [2.0, *model.fc.bias.tolist(), *model.fc.weight.flatten().tolist()]
    assert not theta.requires_grad
    theta += 1.0
    assert model.scale.item() == 2.0


def test_flat_model_computes_the_same(model, batch):
    """The flat model computes what the module does."""
    flat = FlatModel(model, cross_entropy, LAYOUT, counts=True)
    x, y = batch
    loss, correct, gradient, outputs = flat.everything(flatten(model, LAYOUT), x, y)
    expected = model(x)
    cross_entropy(expected, y).backward()
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(loss, cross_entropy(expected, y))
    torch.testing.assert_close(
        gradient, torch.cat([model.scale.grad.reshape(1), model.fc.bias.grad, model.fc.weight.grad.flatten()])
    )
    assert correct.dtype == torch.int64
    assert int(correct) == int((expected.argmax(-1) == y).sum())


def test_modules_own_values_play_no_part(model, batch):
    """They do not change either. A regression has no labels that a class could equal."""
    flat = FlatModel(model, cross_entropy, LAYOUT, counts=False)
    assert flat.outputs(torch.zeros(16), batch[0]).tolist() == [[0.0] * 3] * 5
    assert (model.scale.item(), model.scale.grad) == (2.0, None)
    _, correct, _, _ = flat.everything(flatten(model, LAYOUT), *batch)
    assert (int(correct), correct.dtype) == (0, torch.int64)
    for length in (15, 17):
        with pytest.raises(RuntimeError, match="split"):
            flat.outputs(torch.zeros(length), batch[0])


def test_shared_layers_keep_their_parameters(batch):
    """A layer that is used twice and a parameter of two layers have their value in each place, and are untouched afterwards."""
    torch.manual_seed(0)
    twice, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = twice.weight
    model = nn.Sequential(twice, twice, nn.BatchNorm1d(4).eval(), tied, nn.Linear(4, 3))
    before, layout = dict(model.named_parameters(remove_duplicate=False)), compile_.layout(model)
    flat, theta = FlatModel(model, cross_entropy, layout, counts=True), flatten(model, layout)
    _, _, gradient, _ = flat.everything(theta, *batch)
    assert dict(model.named_parameters(remove_duplicate=False)) == before
    cross_entropy(model(batch[0]), batch[1]).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient, expected)
