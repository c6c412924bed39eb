"""Functions in the form that is traced compute what torch's own do, with the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.owner.task_compiler.recurrent import Lowered

pytestmark = pytest.mark.torch


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
