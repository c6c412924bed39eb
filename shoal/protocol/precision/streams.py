"""Counter streams of a public seed: SHAKE-256 of seed and window number, equal on every platform."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.digests import shake_256
from shoal.types import Float32Vector

WINDOW: Final = 1 << 16
"""Coordinates that are worked on at a time; a multiple of the block of ``int8``. The work memory does not grow with d."""
_LABEL: Final = b"shoal/v1/precision/stream\0"


def windows(length: int) -> Iterator[slice]:
    """Return the windows of a vector of ``length`` coordinates, in order."""
    return (slice(start, min(start + WINDOW, length)) for start in range(0, length, WINDOW))


def stream(seed: bytes, purpose: bytes, window: int, count: int) -> NDArray[np.uint8]:
    """Return ``count`` bytes, uint8, of the stream of one purpose and window."""
    name = _LABEL + len(seed).to_bytes(4, "little") + seed + purpose + window.to_bytes(8, "little")
    return np.frombuffer(shake_256(name, count), np.uint8)


def fractions(seed: bytes, window: int, count: int) -> Float32Vector:
    """Return ``count`` draws, float32, from the 65,536 midpoints of [0, 1)."""
    words = stream(seed, b"rounding\0", window, 2 * count).view("<u2").astype(np.float32)
    return (words + np.float32(0.5)) * np.float32(2.0**-16)
