"""Random numbers for jitter without the ``random`` module, which takes half a megabyte of a device's memory."""

from __future__ import annotations

import os
from typing import Final

_DRAWN: Final[list[int]] = []
"""Numbers that the next calls return: one system call draws 64."""


def uniform(low: float = 0.0, high: float = 1.0) -> float:
    """Return a random number from [low, high), drawn with 32 random bits."""
    try:
        number = _DRAWN.pop()
    except IndexError:
        number, *rest = memoryview(os.urandom(256)).cast("I")
        _DRAWN.extend(rest)
    return low + (high - low) * number / 2**32
