"""Mask and unmask whole vectors: the two functions that device code uses."""

from __future__ import annotations

import numpy as np

from crypto.mask.derivation import MaskKey
from shoal.errors import IntegrityError, KeyMismatchError, UsageError
from shoal.types import Float32Vector, MaskedVector


def mask(vector: Float32Vector, key: MaskKey) -> MaskedVector:
    """Return ``vector`` masked under ``key``, in new memory.

    Args:
        vector: shape (d,), float32, finite; d is ``key.length``.
        key: the mask of the vector's round.

    Raises:
        UsageError: another shape or dtype.
        IntegrityError: a coordinate is NaN or infinite, or becomes so under a mask that mixes coordinates.
    """
    _check_vector(vector, key.length, "vector")
    _check_finite(vector, "the vector to mask")
    values = np.empty(key.length, dtype=np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        key.apply(np.ascontiguousarray(vector), values)
    if not key.exact:
        _check_finite(values, "the vector under its mask")
    return MaskedVector(values=values, key_id=key.key_id)


def unmask(masked: MaskedVector, key: MaskKey, *, out: Float32Vector | None = None) -> Float32Vector:
    """Return ``masked`` without its mask.

    Args:
        masked: a vector masked under ``key``, or a sum of such vectors; may be from the network.
        key: the mask of the vector's round.
        out: shape (d,), float32, C-contiguous, not overlapping ``masked.values``; allocated if None.

    Returns:
        shape (d,), float32; ``out`` if it was given.

    Raises:
        KeyMismatchError: ``masked`` was made under another mask.
        IntegrityError: its length or dtype is not the mask's, or a coordinate is NaN or infinite, masked or not.
        UsageError: ``out`` has a wrong shape, dtype or layout, or overlaps.
    """
    if masked.key_id != key.key_id:
        raise KeyMismatchError(
            f"the vector is under mask {masked.key_id[:16].hex()}, the key at hand is {key.key_id.hex()}",
            hint="it belongs to another round, run, task or mode; wait for the next announcement or rejoin the run",
        )
    values = masked.values
    if values.dtype != np.float32 or values.shape != (key.length,):
        raise IntegrityError(
            f"the masked vector has shape {values.shape} and dtype {values.dtype}, not ({key.length},) and float32"
        )
    _check_finite(values, "the masked vector")
    if out is None:
        out = np.empty(key.length, dtype=np.float32)
    else:
        _check_vector(out, key.length, "out")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise UsageError("out must be writeable and C-contiguous")
        if np.may_share_memory(out, values):
            raise UsageError("out shares memory with the masked vector", hint="pass another array or none")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        key.invert(np.ascontiguousarray(values), out)
    if not key.exact:
        _check_finite(out, "the unmasked vector")
    return out


def _check_vector(vector: Float32Vector, length: int, what: str) -> None:
    if not isinstance(vector, np.ndarray):
        raise UsageError(f"{what} is a {type(vector).__name__}, not a numpy array")
    if vector.dtype != np.float32:
        raise UsageError(f"{what} has dtype {vector.dtype}, not float32", hint="convert it with .astype(numpy.float32)")
    if vector.shape != (length,):
        raise UsageError(f"{what} has shape {vector.shape}, not ({length},)")


def _check_finite(vector: Float32Vector, what: str) -> None:
    # A NaN or an infinity always reaches the sum, so after a finite sum no array of booleans is needed.
    with np.errstate(over="ignore", invalid="ignore"):
        total = vector.sum()
    if not np.isfinite(total) and not np.isfinite(vector).all():
        raise IntegrityError(
            f"{what} holds NaN or infinite coordinates", hint="local training diverged: lower the step size"
        )
