"""Backward formulas against torch's own gradients, and the layers that have none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.errors import TaskError
from shoal.owner.task_compiler.decompositions import (
    adaptive_avg_pool_backward,
    aten,
    avg_pool_backward,
    convolution_backward,
    embedding_backward,
    max_pool2d_backward,
    select_backward,
    slice_backward,
    table,
)

pytestmark = pytest.mark.torch


def passed_back(out):
    """Pass a drawn gradient back from an output and return it."""
    grad = torch.randn_like(out)
    out.backward(grad)
    return grad


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "ceil", "include", "divisor"),
    [
        ((8, 7), [2] * 2, [2] * 2, [0] * 2, False, True, None),
        ((8, 7), [3] * 2, [2] * 2, [1] * 2, True, True, None),
        ((8, 7), [3] * 2, [2] * 2, [1] * 2, True, False, None),
        ((8, 7), [3] * 2, [1] * 2, [1] * 2, False, True, 5),
        ((5, 4, 6), [2, 3, 2], [1, 2, 2], [1, 1, 0], False, False, None),
        ((6, 4), [2] * 2, [], [0] * 2, False, True, None),
    ],
    ids=["plain", "partial windows", "without padding", "divisor", "three dimensions", "torch's default stride"],
)
def test_average_pool_matches_autograd(shape, kernel, stride, padding, ceil, include, divisor):
    """Average pool formula matches autograd."""
    x = torch.randn(2, 3, *shape, requires_grad=True)
    pool = {2: functional.avg_pool2d, 3: functional.avg_pool3d}[len(shape)]
    grad = passed_back(pool(x, kernel, stride or None, padding, ceil, include, divisor))
    found = avg_pool_backward(grad, x, kernel, stride, padding, ceil, include, divisor)
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize(
    ("rank", "stride", "padding", "dilation", "groups"),
    [
        (1, 1, 0, 1, 1), (2, 2, 1, 1, 1), (2, 3, 2, 2, 1), (2, 1, 2, 2, 1), (3, 2, 1, 1, 1),
        (1, 2, 1, 1, 6), (2, 1, 1, 1, 6), (2, 3, 2, 2, 3), (3, 2, 1, 1, 2),
    ],
)  # fmt: skip
def test_convolution_matches_autograd(rank, stride, padding, dilation, groups):
    """Convolution formula matches autograd."""
    conv = getattr(functional, f"conv{rank}d")
    x = torch.randn(2, 6, *[9, 8, 7][:rank], requires_grad=True)
    w = torch.randn(12, 6 // groups, *[3, 2, 3][:rank], requires_grad=True)
    b = torch.randn(12, requires_grad=True)
    grad = passed_back(conv(x, w, b, stride, padding, dilation, groups))
    three = [[value] * rank for value in (stride, padding, dilation)]
    found = convolution_backward(grad, x, w, [12], *three, False, [0] * rank, groups, [True] * 3)
    for ours, theirs in zip(found, (x.grad, w.grad, b.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_embedding_formula_skips_padding_row():
    """Rows that are looked up often add their gradients; those scaled by frequency are refused."""
    table = nn.Embedding(5, 3, padding_idx=2)
    indices = torch.tensor([[0, 2, 2], [4, 4, 1]])
    grad = passed_back(table(indices))
    torch.testing.assert_close(embedding_backward(grad, indices, 5, 2, False), table.weight.grad)
    found = embedding_backward(torch.ones(4, 2), torch.tensor([1, 1, 0, 1]), 3, -1, False)
    assert found.tolist() == [[1.0, 1.0], [3.0, 3.0], [0.0, 0.0]]
    with pytest.raises(TaskError, match=r"scale_grad_by_freq=True.* can't be compiled"):
        embedding_backward(torch.ones(1, 2), torch.tensor([0]), 3, -1, True)


def test_unwanted_gradients_are_skipped():
    """The first layer needs no gradient of its input."""
    x, w = torch.randn(2, 3, 5), torch.randn(4, 3, 3)
    grad = torch.randn_like(functional.conv1d(x, w))
    rest = (None, [1], [0], [1], False, [0], 1)
    assert [g is None for g in convolution_backward(grad, x, w, *rest, [False, True, False])] == [True, False, True]
    assert [g is None for g in convolution_backward(grad, x, w, *rest, [True, False, True])] == [False, True, False]


@pytest.mark.parametrize(
    ("rank", "stride", "padding", "extra", "dilation", "groups"),
    [(1, 2, 1, 1, 1, 1), (2, 2, 0, 0, 1, 1), (2, 2, 1, 1, 1, 3), (2, 3, 1, 1, 2, 1), (2, 3, 2, 2, 1, 3)],
)
def test_transposed_formula_matches_autograd(rank, stride, padding, extra, dilation, groups):
    x = torch.randn(2, 6, *[5, 4][:rank], requires_grad=True)
    w = torch.randn(6, 9 // groups, *[3, 4][:rank], requires_grad=True)
    conv = getattr(functional, f"conv_transpose{rank}d")
    grad = passed_back(conv(x, w, None, stride, padding, extra, groups, dilation))
    three = [[value] * rank for value in (stride, padding, dilation)]
    found = convolution_backward(grad, x, w, None, *three, True, [extra] * rank, groups, [True, True, False])
    torch.testing.assert_close(found[0], x.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], w.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("take", "backward"),
    [
        *(
            (lambda x, at=at: x[:, slice(*at)], lambda grad, at=at: slice_backward(grad, [2, 5, 3], 1, *at))
            for at in ((0, 3, 1), (1, 4, 1), (-3, -1, 1), (2, 5, 1), (0, 5, 2))
        ),
        *(
            (lambda x, at=at: x.select(*at), lambda grad, at=at: select_backward(grad, [2, 5, 3], *at))
            for at in ((0, 0), (1, 2), (1, -1), (-1, -2))
        ),
    ],
    ids=[*(f"slice {n}" for n in range(5)), *(f"select {n}" for n in range(4))],
)
def test_slice_formula_matches_autograd(take, backward):
    x = torch.randn(2, 5, 3, requires_grad=True)
    grad = passed_back(take(x))
    torch.testing.assert_close(backward(grad), x.grad)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 1, 1), (3, 2, 1)])
def test_max_pool_formula_matches_autograd(kernel, stride, padding):
    """Where windows overlap an input may be the maximum of several."""
    x = torch.randn(2, 3, 7, 6, requires_grad=True)
    out, indices = functional.max_pool2d(x, kernel, stride, padding, return_indices=True)
    grad = passed_back(out)
    sizes = [kernel] * 2, [stride] * 2, [padding] * 2, [1, 1]
    torch.testing.assert_close(max_pool2d_backward(grad, x, *sizes, False, indices), x.grad)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [((6, 6), (3, 2)), ((7, 5), (3, 4)), ((4, 3), (4, 1)), ((2, 3), (5, 3))]
)
def test_adaptive_pool_matches_autograd(inputs, outputs):
    """Sizes that do not divide each other give windows of different lengths that overlap."""
    x = torch.randn(2, 3, *inputs, requires_grad=True)
    grad = passed_back(functional.adaptive_avg_pool2d(x, outputs))
    torch.testing.assert_close(adaptive_avg_pool_backward(grad, x), x.grad)


def test_table_has_our_formulas_too():
    """The table has these formulas beside torchs own."""
    found = table()
    assert found[aten.convolution_backward.default] is convolution_backward
    assert found[aten.max_pool2d_with_indices_backward.default] is max_pool2d_backward
    assert found[aten.avg_pool3d_backward.default] is found[aten.avg_pool2d_backward.default] is avg_pool_backward
    assert found[aten._adaptive_avg_pool2d_backward.default] is adaptive_avg_pool_backward
    assert found[aten.embedding_dense_backward.default] is embedding_backward
    assert aten.native_layer_norm_backward.default in found
