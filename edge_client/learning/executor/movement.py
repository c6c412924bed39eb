"""Operators that move elements: shapes, slices, indices. Semantics are those of ONNX's operator of the same name.

Results may be views of their inputs. An index outside its dimension, or a shape that does not fit, raises TaskError, ValueError
or IndexError; the caller gives them the operator's name. ONNX's attributes are keyword arguments of the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from edge_client.learning.executor.arithmetic import Array, axis_of, broadcast, checked
from shoal.errors import TaskError

_SCATTERED: Final[Mapping[str, np.ufunc]] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def identity(x: Array) -> Array:
    """Identity."""
    return x


def constant(*, value: Array) -> Array:
    """Constant: the tensor of the node."""
    return value


def shape(x: Array, *, start: int = 0, end: int | None = None) -> Array:
    """Shape: the dimensions from ``start`` to before ``end``, int64."""
    return np.array(x.shape[start:end], np.int64)


def reshape(x: Array, shape: Array, *, allowzero: int = 0) -> Array:
    """Reshape: -1 stands for the dimension that is left; 0 for the input's own, unless ``allowzero``."""
    wanted = _integers(shape)
    if not allowzero:
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    if min(wanted, default=0) < -1:
        raise TaskError(f"a tensor of the negative shape {tuple(wanted[:8])}")
    return x.reshape(wanted)


def transpose(x: Array, *, perm: tuple[int, ...] | None = None) -> Array:
    """Transpose: by default the order of all dimensions is turned round."""
    return x.transpose(perm)


def squeeze(x: Array, axes: Array | None = None) -> Array:
    """Squeeze: leave out the given dimensions of 1, by default all of them."""
    return x.squeeze(None if axes is None else tuple(_integers(axes)))


def unsqueeze(x: Array, axes: Array) -> Array:
    """Unsqueeze: insert dimensions of 1, at these positions of the result."""
    return np.expand_dims(x, tuple(_integers(axes)))


def expand(x: Array, shape: Array) -> Array:
    """Expand: broadcast to a shape and the input's own."""
    return np.broadcast_to(x, broadcast(x.shape, checked(_integers(shape))))


def concat(*parts: Array, axis: int) -> Array:
    """Concat along an axis."""
    along = axis_of(axis, parts[0].ndim)
    first = parts[0].shape
    checked((*first[:along], sum(part.shape[along] for part in parts), *first[along + 1 :]))
    return np.concatenate(parts, along)


def split(x: Array, sizes: Array | None = None, *, axis: int = 0, num_outputs: int | None = None) -> tuple[Array, ...]:
    """Split along an axis into parts of the given sizes, or into ``num_outputs`` equal ones, the last of which may be smaller."""
    along = axis_of(axis, x.ndim)
    whole = x.shape[along]
    if (sizes is None) == (num_outputs is None):
        raise TaskError("Split takes either sizes or num_outputs")
    lengths = _equal(whole, num_outputs) if sizes is None else _integers(sizes)
    if min(lengths, default=0) < 0 or sum(lengths) != whole:
        raise TaskError(f"Split of a dimension of {whole} into {lengths[:8]}")
    return tuple(np.split(x, np.cumsum(lengths[:-1], dtype=np.int64).tolist(), along))


def _equal(whole: int, parts: int | None) -> list[int]:
    if parts is None or not 1 <= parts <= max(whole, 1):
        raise TaskError(f"Split of a dimension of {whole} into {parts} parts")
    size = -(-whole // parts)
    return [max(0, min(size, whole - size * i)) for i in range(parts)]


def slice_(x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Array:
    """Slice: from each start to before its end; bounds out of range are clamped, see `_cut`."""
    first, last = _integers(starts), _integers(ends)
    along = list(range(len(first))) if axes is None else [axis_of(axis, x.ndim) for axis in _integers(axes)]
    strides = [1] * len(first) if steps is None else _integers(steps)
    if not len(first) == len(last) == len(along) == len(strides) == len(set(along)) or len(first) > x.ndim:
        raise TaskError("Slice takes a start, an end and a step for each of its axes")
    cuts: list[Any] = [slice(None)] * x.ndim
    for axis, start, end, step in zip(along, first, last, strides, strict=True):
        cuts[axis] = _cut(x.shape[axis], start, end, step)
    return np.asarray(x[tuple(cuts)])


def _cut(size: int, start: int, end: int, step: int) -> slice:
    """Return the slice of a dimension. Backwards, a start before the first element is the first; Python's would be empty."""
    lowest, highest = (0, size) if step > 0 else (-1, size - 1)
    begin = min(max(start + size if start < 0 else start, 0), highest)
    stop = min(max(end + size if end < 0 else end, lowest), highest)
    return slice(begin, None if stop < 0 else stop, step)


def gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    """Gather: the slices along an axis at these indices, of which negative ones count from the end."""
    along = axis_of(axis, x.ndim)
    checked((*x.shape[:along], *indices.shape, *x.shape[along + 1 :]))
    return np.asarray(np.take(x, indices, axis=along, mode="raise"))


def gather_elements(x: Array, indices: Array, *, axis: int = 0) -> Array:
    """GatherElements: one element at each index along an axis; the other coordinates are those of the index."""
    along = axis_of(axis, x.ndim)
    return np.take_along_axis(x[_part(x, indices, along)], indices, along)


def scatter_elements(x: Array, indices: Array, updates: Array, *, axis: int = 0, reduction: str = "none") -> Array:
    """ScatterElements: a copy with the updates written at the indices along an axis, or added, multiplied and so on."""
    along = axis_of(axis, x.ndim)
    _part(x, indices, along)
    if updates.shape != indices.shape:
        raise TaskError(f"ScatterElements has updates of shape {updates.shape} for indices of shape {indices.shape}")
    if reduction != "none" and reduction not in _SCATTERED:
        raise TaskError(f"ScatterElements has the reduction {reduction[:40]!r}")
    result = x.copy()
    at = _flat(indices, x.shape, along)
    if reduction == "none":
        result.reshape(-1)[at] = updates.ravel()
    else:
        # One dimension: numpy has a fast path for it.
        _SCATTERED[reduction].at(result.reshape(-1), at, updates.ravel())
    return result


def _part(x: Array, indices: Array, along: int) -> tuple[slice, ...]:
    """Return the part of ``x`` that elementwise indices refer to: ``x`` may be longer than they in the other dimensions."""
    if indices.ndim != x.ndim or any(indices.shape[i] > n for i, n in enumerate(x.shape) if i != along):
        raise TaskError(f"indices of shape {indices.shape} for a tensor of shape {x.shape}")
    return tuple(slice(None) if i == along else slice(n) for i, n in enumerate(indices.shape))


def _flat(indices: Array, shape: tuple[int, ...], along: int) -> Array:
    """Return the positions of elementwise indices in the flattened tensor, in the order of the indices."""
    places: list[Array] = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    places[along] = np.where(indices < 0, indices + shape[along], indices)
    flat: Array = np.ravel_multi_index(tuple(np.broadcast_arrays(*places)), shape)
    return flat.ravel()


def one_hot(indices: Array, depth: Array, values: Array, *, axis: int = -1) -> Array:
    """OneHot: ``values`` is (off, on); an index below 0 counts from the end, one out of range gives off alone."""
    if depth.size != 1 or values.shape != (2,):
        raise TaskError("OneHot takes one depth and two values")
    count, along = int(depth.item()), axis_of(axis, indices.ndim + 1)
    checked((*indices.shape, count))
    found = np.where(indices < 0, indices + count, indices)
    levels = np.arange(count).reshape([count if i == along else 1 for i in range(indices.ndim + 1)])
    hot: Array = np.where(np.expand_dims(found, along) == levels, values[1], values[0])
    return hot


def constant_of_shape(shape: Array, *, value: Array | None = None) -> Array:
    """ConstantOfShape: a tensor of one number, by default 0 in float32."""
    fill: Any = np.zeros(1, np.float32) if value is None else value
    if fill.size != 1:
        raise TaskError("ConstantOfShape takes one number")
    return np.full(checked(_integers(shape)), fill.item(), fill.dtype)


def _integers(values: Array) -> list[int]:
    """Return the numbers of a tensor of at most one dimension, such as shapes and axes."""
    if values.ndim > 1:
        raise TaskError(f"a list of integers has shape {values.shape}")
    return [int(value) for value in values.ravel().tolist()]
