"""Encode and decode a vector in one of the precisions of `shoal.limits.PRECISIONS`."""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal.errors import IntegrityError, UsageError, WireError
from shoal.protocol.precision import blocks
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.types import Float32Vector

LARGEST_FLOAT16: Final = np.float32(65504.0)


def encode(vector: Float32Vector, precision: str, seed: bytes) -> bytes:
    """Return a vector as bytes; the same vector, precision and seed give the same bytes.

    Args:
        vector: shape (d,), float32, finite. In float16 a coordinate is at most 65504 in size: larger ones are clipped.
        precision: one of `shoal.limits.PRECISIONS`.
        seed: public; another one for each upload and each mean, see `shoal.protocol.precision.seeds`.

    Raises:
        WireError: no such precision, or more than `shoal.limits.MAX_COORDINATES` coordinates.
        UsageError: another shape or dtype.
        IntegrityError: a coordinate is NaN or infinite, or too large to encode.
    """
    if vector.ndim != 1 or vector.dtype != np.float32:
        raise UsageError(f"a vector of shape {vector.shape} and dtype {vector.dtype}, not (d,) and float32")
    encoded_bytes(vector.size, precision)
    if not np.isfinite(vector).all():
        raise IntegrityError(
            "the vector to encode holds NaN or infinite coordinates",
            hint="local training diverged: lower the step size",
        )
    vector = np.ascontiguousarray(vector)
    if not vector.size:
        return b""
    match precision:
        case "float32":
            return vector.astype("<f4", copy=False).tobytes()
        case "float16":
            return np.clip(vector, -LARGEST_FLOAT16, LARGEST_FLOAT16).astype("<f2").tobytes()
    return blocks.encode(vector, seed)


def decode(data: bytes | memoryview, length: int, precision: str, *, copy: bool = True) -> Float32Vector:
    """Return the vector of `encode`, (length,) float32 in new memory; all platforms give the same bits.

    Args:
        data: from a peer; nothing in it is trusted.
        length: coordinates, from the signed plan.
        precision: likewise.
        copy: False allows a view of ``data``, which float32 needs no copy for.

    Raises:
        WireError: another number of bytes, a coordinate or scale that is not finite or out of range, or no such precision.
    """
    view = memoryview(data)
    expected = encoded_bytes(length, precision)
    if view.nbytes != expected:
        raise WireError(f"{view.nbytes} bytes where {length} coordinates in {precision} take {expected}")
    if not length:
        return np.empty(0, np.float32)
    match precision:
        case "float32":
            return _finite(np.frombuffer(view, "<f4").astype(np.float32, copy=copy))
        case "float16":
            return _finite(np.frombuffer(view, "<f2").astype(np.float32))
    return blocks.decode(view, length)


def _finite(vector: Float32Vector) -> Float32Vector:
    if not np.isfinite(vector).all():
        raise WireError("a coordinate is NaN or infinite")
    return vector
