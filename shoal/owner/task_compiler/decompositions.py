"""Backward formulas that ONNX has no operator for, written as operators it has.

torch's core decompositions leave the backward operators of common layers; each is a linear map, so its transpose can
be written as a convolution, a scatter or a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions

from shoal.errors import TaskError

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Return torch's core decompositions with the backward operators of this module added."""
    decompositions: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    decompositions[aten.convolution_backward.default] = convolution_backward
    decompositions[aten.max_pool2d_with_indices_backward.default] = max_pool2d_backward
    decompositions[aten.avg_pool2d_backward.default] = avg_pool_backward
    decompositions[aten.avg_pool3d_backward.default] = avg_pool_backward
    decompositions[aten._adaptive_avg_pool2d_backward.default] = adaptive_avg_pool_backward
    decompositions[aten.embedding_dense_backward.default] = embedding_backward
    decompositions[aten.empty_permuted.default] = empty_permuted
    decompositions[aten.select_backward.default] = select_backward
    decompositions[aten.slice_backward.default] = slice_backward
    return decompositions


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,  # noqa: ARG001  # the operator's signature
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],  # noqa: ARG001
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a convolution, plain, grouped or transposed.

    With respect to the input: the convolution of ``grad`` that is transposed if this one is not. With respect to the weight: the
    convolution of input and ``grad`` with batch and channel axes swapped, stride and dilation exchanged; the samples of
    each group of input channels are the channels of that group. In a transposed one input and ``grad`` change places.

    Shapes:
        grad: shape (n, c_out, *spatial_out), float32.
        x: shape (n, c_in, *spatial).
        weight: shape (c_out, c_in / groups, *kernel); transposed (c_in, c_out / groups, *kernel).
    """
    rank = weight.ndim - 2
    zeros = [0] * rank
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        reach = [
            (grad.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1
            for i in range(rank)
        ]
        rest = zeros if transposed else [x.shape[2 + i] - reach[i] for i in range(rank)]
        grad_x = aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, rest, groups)
    if mask[1]:
        wide, narrow = (grad, x) if transposed else (x, grad)
        samples, channels, spatial = x.shape[0], weight.shape[1], wide.shape[2:]
        by_channel = wide.reshape(samples, groups, channels, *spatial).permute(2, 1, 0, *range(3, 3 + rank))
        by_channel = by_channel.reshape(channels, groups * samples, *spatial)
        swapped = aten.convolution(
            by_channel, narrow.transpose(0, 1), None, dilation, padding, stride, False, zeros, groups
        )
        grad_weight = swapped.transpose(0, 1)
        for axis in range(2, 2 + rank):  # a stride that does not divide the input leaves surplus taps
            grad_weight = grad_weight.narrow(axis, 0, weight.shape[axis])
    if mask[2]:
        grad_bias = grad.sum([0, *range(2, grad.ndim)])
    return grad_x, grad_weight, grad_bias


def max_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],  # noqa: ARG001
    stride: Sequence[int],  # noqa: ARG001
    padding: Sequence[int],  # noqa: ARG001
    dilation: Sequence[int],  # noqa: ARG001
    ceil_mode: bool,  # noqa: ARG001
    indices: Tensor,
) -> Tensor:
    """Send each output's gradient to the input that was its maximum.

    Shapes:
        grad: shape (n, c, h, w), float32.
        x: shape (n, c, H, W).
        indices: shape (n, c, h, w), int64, positions in a flattened H x W plane.
    """
    n, c, height, width = x.shape
    flat = grad.shape[2] * grad.shape[3]
    zeros = torch.zeros(n, c, height * width, dtype=grad.dtype)
    spread = zeros.scatter_add(2, indices.reshape(n, c, flat), grad.reshape(n, c, flat))
    return spread.view(n, c, height, width)


def _transpose_average(grad: Tensor, windows: Sequence[Sequence[tuple[int, int, int]]], sizes: Sequence[int]) -> Tensor:
    """Apply the transpose of a separable average, axis by axis, as matrix products.

    Shapes:
        grad: shape (..., *output sizes), float32.
        windows: for each spatial axis and output, (first input, end input, divisor).
        sizes: input size of each spatial axis.
    """
    for i, (axis_windows, size) in enumerate(zip(windows, sizes, strict=True)):
        axis = grad.ndim - len(sizes) + i
        rows = [[1.0 / count if first <= j < end else 0.0 for j in range(size)] for first, end, count in axis_windows]
        grad = (grad.movedim(axis, -1) @ torch.tensor(rows, dtype=grad.dtype)).movedim(-1, axis)
    return grad


def avg_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,  # noqa: ARG001  # the output size already says it
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Gradient of average pooling in two or three dimensions; windows and divisors as in torch.

    Shapes:
        grad: shape (n, c, *output sizes), float32.
        x: shape (n, c, *input sizes).
    """
    rank = len(kernel)
    stride = stride or kernel
    sizes = [int(size) for size in x.shape[-rank:]]
    windows = []
    for i in range(rank):
        axis: list[tuple[int, int, int]] = []
        for out in range(int(grad.shape[-rank + i])):
            start = out * stride[i] - padding[i]
            padded_end = min(start + kernel[i], sizes[i] + padding[i])
            first, end = max(start, 0), min(padded_end, sizes[i])
            count = padded_end - start if count_include_pad else end - first
            axis.append((first, end, 1 if divisor_override else count))
        windows.append(axis)
    spread = _transpose_average(grad, windows, sizes)
    return spread / divisor_override if divisor_override else spread


def adaptive_avg_pool_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of adaptive average pooling: output i averages inputs floor(i s / o) to ceil((i + 1) s / o).

    Shapes:
        grad: shape (n, c, h, w), float32.
        x: shape (n, c, H, W).
    """
    sizes = [int(size) for size in x.shape[-2:]]
    windows = []
    for size, outputs in zip(sizes, (int(o) for o in grad.shape[-2:]), strict=True):
        bounds = [(i * size // outputs, -(-(i + 1) * size // outputs)) for i in range(outputs)]
        windows.append([(first, end, end - first) for first, end in bounds])
    return _transpose_average(grad, windows, sizes)


def embedding_backward(grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_by_frequency: bool) -> Tensor:
    """Sum the gradient of each looked-up row.

    Shapes:
        grad: shape (*indices shape, width), float32.
        indices: int64.
        rows: rows of the embedding table.
        padding_idx: row that takes no gradient, or negative.
    """
    if scale_by_frequency:
        raise TaskError("Embedding(scale_grad_by_freq=True) can't be compiled", hint="leave it at False")
    width = grad.shape[-1]
    if padding_idx >= 0:
        grad = torch.where((indices == padding_idx).unsqueeze(-1), torch.zeros((), dtype=grad.dtype), grad)
    where = indices.reshape(-1, 1).expand(-1, width)
    return torch.zeros(rows, width, dtype=grad.dtype).scatter_add(0, where, grad.reshape(-1, width))


def empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> Tensor:  # noqa: ARG001
    """Return zeros: memory that is written before it is read, in an order that a graph doesn't have."""
    return torch.zeros(size, dtype=options.get("dtype"))


def select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """Return zeros of shape ``sizes`` with ``grad`` at ``index`` of an axis: torch's own makes a mask that grows with the axis.

    Shapes:
        grad: shape ``sizes`` without the axis.
    """
    axis = dim % len(sizes)
    return slice_backward(grad.unsqueeze(axis), sizes, axis, index % sizes[axis], 0, 1)


def slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    """Return zeros of shape ``sizes`` with ``grad`` from ``start`` of an axis on, joined if the step is 1."""
    if step != 1:
        return cast(Tensor, torch._decomp.decompositions.slice_backward(grad, list(sizes), dim, start, end, step))
    axis = dim % len(sizes)
    first = start + sizes[axis] if start < 0 else start
    around = [
        grad.new_zeros([*sizes[:axis], n, *sizes[axis + 1 :]]) for n in (first, sizes[axis] - first - grad.shape[axis])
    ]
    return torch.cat([around[0], grad, around[1]], axis)
