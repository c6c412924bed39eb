"""Scales of quantised vectors: 0, or in a range in which no decoded coordinate overflows or is a denormal number.

Some processors drop denormal numbers, and all devices must decode a mean to the same bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import IntegrityError, WireError

LEAST: Final = np.float32(2.0**-90)
MOST: Final = np.float32(2.0**100)


def flushed(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales, float32, with those below `LEAST` as 0.

    Raises:
        IntegrityError: one is above `MOST`.
    """
    if scales.max(initial=0) > MOST:
        raise IntegrityError("a vector too long to encode", hint="local training diverged: lower the step size")
    return np.where(scales < LEAST, np.float32(0), scales)


def checked(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return received scales, float32.

    Raises:
        WireError: one is NaN, negative or out of range.
    """
    allowed = (scales == 0) | ((scales >= LEAST) & (scales <= MOST))
    if not allowed.all() or np.signbit(scales).any():
        raise WireError("a scale out of range")
    return scales.astype(np.float32)
