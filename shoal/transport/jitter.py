"""Random numbers for jitter without the ``random`` module, which takes half a megabyte of a device's memory."""

from __future__ import annotations

import os


def uniform(low: float = 0.0, high: float = 1.0) -> float:
    """Return a random number from [low, high), drawn with 32 random bits."""
    return low + (high - low) * int.from_bytes(os.urandom(4), "little") / 2**32
