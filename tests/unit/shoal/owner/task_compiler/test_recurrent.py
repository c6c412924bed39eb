"""Recurrent layers as loops: results and gradients of torch's own functions, in graphs that don't grow with the steps.

Functions in the form that is traced compute what torch's own do, with the same gradients.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional

from shoal.owner.task_compiler.builtin import cross_entropy
from shoal.owner.task_compiler.compile import layout, quiet
from shoal.owner.task_compiler.flat import FlatModel, flatten
from shoal.owner.task_compiler.graphs import trace
from shoal.owner.task_compiler.recurrent import Lowered

pytestmark = pytest.mark.torch
KINDS = {
    "lstm": lambda **options: nn.LSTM(3, 4, **options),
    "gru": lambda **options: nn.GRU(3, 4, **options),
    "tanh": lambda **options: nn.RNN(3, 4, **options),
    "relu": lambda **options: nn.RNN(3, 4, nonlinearity="relu", **options),
}


def results(layer, x, start):
    """Return all results, and the gradients of a function of them with respect to weights, x and start."""

    def objective(values, x, start):
        outputs, ends = functional_call(layer, values, (x, start))
        found = (outputs, *ends) if isinstance(ends, tuple) else (outputs, ends)
        return sum((i + 1) * (each**2).sum() + each.sum() for i, each in enumerate(found)), found

    gradients, (_, found) = grad_and_value(objective, (0, 1, 2), has_aux=True)(dict(layer.named_parameters()), x, start)
    return [*found, *gradients[0].values(), gradients[1], *gradients[2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "batch_first": True},
        {"num_layers": 2, "bias": False},
        {"num_layers": 2, "bidirectional": True},
    ],
)
def test_loop_gives_what_torchs_layer_does(kind, options):
    torch.manual_seed(0)
    layer = KINDS[kind](**options).double()
    x, shape = torch.randn(5, 2, 3).double(), (layer.num_layers * (1 + layer.bidirectional), 2, 4)
    x = x.transpose(0, 1) if layer.batch_first else x
    start = torch.randn(shape).double()
    start = (start, torch.randn(shape).double()) if kind == "lstm" else start
    expected = results(layer, x, start)
    with Lowered():
        found = results(layer, x, start)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Last(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body, self.head = nn.LSTM(3, 4, batch_first=True, **options), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


def traced(model, steps):
    flat = FlatModel(model, cross_entropy, layout(model), counts=True)
    inputs = flatten(model, layout(model)), torch.randn(5, steps, 3), torch.randint(0, 2, (5,))
    with quiet():
        graph = trace(flat, inputs)
    return graph, flat, inputs


@pytest.mark.slow
def test_graph_does_not_grow_with_the_steps():
    (short, *_), (long, flat, inputs) = (traced(Last(), steps) for steps in (3, 300))
    assert len(short.graph.nodes) == len(long.graph.nodes)
    for found, expected in zip(long(*inputs), flat.everything(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projected_states_are_written_out():
    """A form that the loop doesn't have stays torch's own."""
    model = Last(proj_size=2)
    model.head = nn.Linear(2, 2)
    graph, flat, inputs = traced(model, 3)
    assert not [node for node in graph.graph.nodes if "scan" in node.name]
    torch.testing.assert_close(graph(*inputs)[0], flat.everything(*inputs)[0])


def test_callers_layer_stays_as_it_was():
    """Its list of weights too, which torch renews only at the next call."""
    model = Last()
    traced(model, 2)
    assert all(a is b for a, b in zip(model.body._flat_weights, model.body.parameters(), strict=True))
    copy.deepcopy(model)


def step(cell):
    return lambda x: (
        torch.stack(cell(x, (x[:, :4].sin(), x[:, :4].cos()))) if isinstance(cell, nn.LSTMCell) else cell(x)
    )


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (nn.Linear(5, 3), (2, 4, 5)),
        (nn.Linear(5, 3, bias=False), (2, 5)),
        (step(nn.LSTMCell(5, 4)), (2, 5)),
        (step(nn.GRUCell(5, 4, bias=False)), (2, 5)),
        (step(nn.RNNCell(5, 4, nonlinearity="relu")), (2, 5)),
        (lambda x: functional.adaptive_max_pool1d(x, 3), (2, 4, 12)),
        (lambda x: functional.adaptive_max_pool2d(x, (2, 3)), (2, 4, 8, 6)),
        (lambda x: functional.adaptive_max_pool2d(x, 3), (2, 4, 8, 6)),
    ],
)
def test_results_and_gradients_are_torchs(function, shape):
    torch.manual_seed(0)
    found = []
    x = torch.randn(shape, requires_grad=True)
    for mode in (torch.enable_grad, Lowered):
        with mode():
            result = function(x)
            (gradient,) = torch.autograd.grad((result**2).sum(), x)
        found.append((result, gradient))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
