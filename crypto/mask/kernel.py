"""The optional compiled kernel of the masks: the distribution `shoal-kernel` in deploy/kernel, one C file.

It gives the bits of the numpy code and is used without a setting where it is installed: for the butterflies of
`crypto.mask.hadamard` and the sort of `crypto.mask.stream`. At its first use it computes fixed vectors. If a bit differs from
numpy's, because of a compiler or a processor, it is left unused with a warning: devices with other masks could not take part.

Example: `pip install ./deploy/kernel` beside Shoal, and restart the device.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.digests import sha256

LOG = logging.getLogger("shoal.mask")
PACKAGE: Final = "shoal_kernel"
CHECKED: Final = ((1, 0), (12, 2), (640, 7), (40_960, 12))
"""Coordinates and bits of a block in the fixed vectors: with one pass and two, and with rows that no vector register divides."""
EXPECTED: Final = bytes.fromhex("5d057e82949937082bdfff5f43b292617394c7e9d2c68da09fe1ad05c1c4bda6")
"""SHA-256 of what numpy makes of the fixed vectors."""


class Kernel:
    """The functions of a library that was built from kernel.c."""

    def __init__(self, library: Path) -> None:
        """Load the library.

        Raises:
            OSError: it can't be loaded, for another processor for example.
            AttributeError: it lacks a function.
        """
        found, pointer, count = ctypes.CDLL(str(library)), ctypes.c_void_p, ctypes.c_int64
        self._blocks, self._sorted = found.shoal_blocks, found.shoal_sorted
        self._blocks.argtypes, self._blocks.restype = (pointer, count, ctypes.c_int32, ctypes.c_float), None
        self._sorted.argtypes, self._sorted.restype = (pointer, pointer, pointer, count), ctypes.c_int32

    def blocks(self, vector: NDArray[np.float32], bits: int, scale: np.float32) -> None:
        """Transform in place the columns of ``vector``, shape (2**bits * n,), float32, read as a matrix of n columns."""
        self._blocks(vector.ctypes.data, vector.size, bits, scale)

    def sorted(self, low: NDArray[np.uint16], high: NDArray[np.uint16]) -> NDArray[np.int32]:
        """Return the places of some coordinates in the order of their 32-bit numbers, all shape (n,).

        Raises:
            MemoryError: 16 bytes a coordinate are not free.
        """
        low, high = np.ascontiguousarray(low), np.ascontiguousarray(high)
        order = np.empty(low.size, np.int32)
        if self._sorted(low.ctypes.data, high.ctypes.data, order.ctypes.data, low.size):
            raise MemoryError
        return order

    def digest(self) -> bytes:
        """Return the SHA-256 of what the kernel makes of the fixed vectors."""
        made = b""
        for count, bits in CHECKED:
            vector = fixed_vector(count)
            self.blocks(vector, bits, np.float32(0.5))
            low, high = fixed_digits(count)
            made += vector.tobytes() + self.sorted(low, high).tobytes()
        return sha256(made)


def fixed_vector(count: int) -> NDArray[np.float32]:
    """Return the fixed vector of ``count`` coordinates, float32: their sums are rounded, so another order gives other bits."""
    return np.float32(1) / np.arange(1, count + 1, dtype=np.float32)


def fixed_digits(count: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return the low and high digits of ``count`` fixed 32-bit numbers, some of them equal, shape (count,), uint16."""
    thirds = np.arange(count) // 3
    return (thirds * 40_503).astype(np.uint16), (thirds % 5).astype(np.uint16)


@cache
def installed() -> Kernel | None:
    """Return the kernel of the installed distribution; None without one, or if its bits differ from numpy's."""
    try:
        library = importlib.import_module(PACKAGE).LIBRARY
    except ImportError:
        return None
    try:
        kernel = Kernel(library)
        reason = "" if kernel.digest() == EXPECTED else "its results differ from numpy's"
    except (OSError, AttributeError) as error:
        reason = str(error)
    if reason:
        LOG.warning(
            "the compiled kernel is not used: install it again", extra={"kv": {"file": library, "reason": reason}}
        )
        return None
    return kernel
