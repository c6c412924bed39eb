"""Operators that compute: elementwise, reductions, matrix products. Semantics are those of ONNX's operator of the same name.

Inputs are arrays of one dtype, checked by the caller; results have the dtype that ONNX gives them. ONNX's attributes are
keyword arguments of the same names.

The memory of a graph's values is checked before an operator takes it: a tensor has at most MAX_ELEMENTS, as a received model has
at most that many coordinates; all values of a graph that are alive at one time take at most MAX_LIVE_BYTES, with views counted
as if they were copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import TaskError
from shoal.limits import MAX_COORDINATES
from shoal.task.onnx_contents import DTYPES

MAX_ELEMENTS: Final = MAX_COORDINATES
"""Most elements of one tensor."""

MAX_LIVE_BYTES: Final = 8 * 4 * MAX_COORDINATES
"""Most bytes of all values alive at one time: eight models of the largest length."""


def checked(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as a tuple.

    Raises:
        TaskError: it is negative in a dimension, or has more than MAX_ELEMENTS.
    """
    if min(shape, default=0) < 0:
        raise TaskError(f"a tensor of the negative shape {tuple(shape[:8])}")
    if math.prod(shape) > MAX_ELEMENTS:
        raise TaskError(f"a tensor of shape {tuple(shape[:8])} has more than {MAX_ELEMENTS} elements")
    return tuple(shape)


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which two shapes broadcast; many times as fast as numpy's own function of arrays.

    Raises:
        TaskError: they do not broadcast, or as for `checked`.
    """
    if a == b or not b:
        return a
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    lead = len(longer) - len(shorter)
    result = list(longer)
    for place, n in enumerate(shorter, lead):
        if n != result[place]:
            if n != 1 and result[place] != 1:
                raise TaskError(f"shapes {a} and {b} do not fit together")
            result[place] = n if result[place] == 1 else result[place]
    return checked(result)


Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float32]


def unary(function: Callable[[Array], Any]) -> Callable[[Array], Array]:
    """Return an operator that applies a ufunc to one input."""

    def apply(x: Array) -> Array:
        return np.asarray(function(x))

    return apply


def binary(function: Callable[[Array, Array], Any]) -> Callable[[Array, Array], Array]:
    """Return an operator that applies a ufunc to two inputs, broadcast to one shape."""

    def apply(a: Array, b: Array) -> Array:
        broadcast(a.shape, b.shape)
        return np.asarray(function(a, b))

    return apply


def variadic(function: Callable[[Array, Array], Any]) -> Callable[..., Array]:
    """Return an operator that applies a ufunc to any number of inputs, two at a time from the left."""
    two = binary(function)

    def apply(first: Array, *others: Array) -> Array:
        return reduce(two, others, first)

    return apply


def divide(a: Array, b: Array) -> Array:
    """Div: integers are truncated towards zero, and must not be divided by zero."""
    broadcast(a.shape, b.shape)
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    if not b.all():
        raise TaskError("an integer is divided by zero")
    quotient = np.asarray(a // b)
    return np.asarray(quotient + ((quotient < 0) & (quotient * b != a))).astype(a.dtype)


def power(base: Floats, exponent: Array) -> Floats:
    """Pow: the result has the base's dtype; a single exponent of 2 is a product, as in ONNX Runtime."""
    broadcast(base.shape, exponent.shape)
    if exponent.size == 1 and exponent.ndim <= base.ndim and exponent.item() == 2:
        return np.asarray(base * base)
    return np.asarray(np.power(base, exponent.astype(np.float32)))


def relu(x: Floats) -> Floats:
    """Relu: max(x, 0)."""
    return np.asarray(np.maximum(x, np.float32(0)))


def sigmoid(x: Floats) -> Floats:
    """Sigmoid: 1 / (1 + e^-x), without overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, np.float32(1), small) / (1 + small))


def cast(x: Array, *, to: int = 0, saturate: int = 1) -> Array:
    """Cast to element type ``to``; ``saturate`` concerns 8-bit floats alone, which are not supported."""
    del saturate
    if to not in DTYPES:
        raise TaskError(f"Cast to element type {to} is not supported")
    return x.astype(DTYPES[to])


def where(condition: Array, x: Array, y: Array) -> Array:
    """Where: x where the condition holds, else y."""
    broadcast(condition.shape, broadcast(x.shape, y.shape))
    return np.where(condition, x, y)


def reduce_sum(x: Array, axes: Array | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
    """ReduceSum, over all axes if none are given."""
    if _is_noop(axes, noop_with_empty_axes):
        return x
    return np.asarray(np.sum(x, axis=_axes(axes), keepdims=bool(keepdims), dtype=x.dtype))


def reduce_mean(x: Floats, axes: Array | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Floats:
    """ReduceMean, over all axes if none are given."""
    if _is_noop(axes, noop_with_empty_axes):
        return x
    return np.asarray(np.mean(x, axis=_axes(axes), keepdims=bool(keepdims)))


def _is_noop(axes: Array | None, noop_with_empty_axes: int) -> bool:
    return bool(noop_with_empty_axes) and (axes is None or not axes.size)


def _axes(axes: Array | None) -> tuple[int, ...] | None:
    return None if axes is None or not axes.size else tuple(axes.ravel().tolist())


def argmax(x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    """ArgMax: int64 index of the largest element, of equal ones the first or the last."""
    along = axis_of(axis, x.ndim)
    if not select_last_index:
        return np.asarray(np.argmax(x, axis=along, keepdims=bool(keepdims)), dtype=np.int64)
    last = np.argmax(np.flip(x, along), axis=along, keepdims=bool(keepdims))
    return np.asarray(x.shape[along] - 1 - last, dtype=np.int64)


def softmax(x: Floats, *, axis: int = -1) -> Floats:
    """Softmax over one axis."""
    along = axis_of(axis, x.ndim)
    powers = np.exp(x - x.max(axis=along, keepdims=True))
    return np.asarray(powers / powers.sum(axis=along, keepdims=True))


def log_softmax(x: Floats, *, axis: int = -1) -> Floats:
    """LogSoftmax over one axis."""
    along = axis_of(axis, x.ndim)
    shifted = x - x.max(axis=along, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=along, keepdims=True)))


def matmul(a: Floats, b: Floats) -> Floats:
    """MatMul: products of matrices, batched over leading dimensions; a vector counts as a row or a column."""
    if not a.ndim or not b.ndim:
        raise TaskError("MatMul takes no scalars")
    rows, columns = a.shape[-2:-1], b.shape[-1:] if b.ndim > 1 else ()
    checked((*broadcast(a.shape[:-2], b.shape[:-2]), *rows, *columns))
    return np.asarray(np.matmul(a, b))


def gemm(
    a: Floats,
    b: Floats,
    c: Floats | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Floats:
    """Gemm: alpha A B + beta C of matrices, A and B transposed if asked for; C broadcasts to the product's shape."""
    if a.ndim != 2 or b.ndim != 2:
        raise TaskError(f"Gemm takes matrices, not shapes {a.shape} and {b.shape}")
    left, right = a.T if transA else a, b.T if transB else b
    shape = checked((len(left), right.shape[1]))
    if c is not None and broadcast(shape, c.shape) != shape:
        raise TaskError(f"Gemm adds shape {c.shape} to a product of shape {shape}")
    product: Floats = np.matmul(left, right)
    if alpha != 1:
        product *= np.float32(alpha)
    if c is not None:
        product += c if beta == 1 else np.float32(beta) * c
    return product


def axis_of(axis: int, dimensions: int) -> int:
    """Return an axis, counted from the end if negative, as one of 0 to dimensions - 1."""
    if not -dimensions <= axis < dimensions:
        raise TaskError(f"axis {axis} of a tensor of {dimensions} dimensions")
    return axis % dimensions
