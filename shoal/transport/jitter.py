"""Random numbers for jitter, without the random module: it would cost a device half a megabyte."""

from __future__ import annotations

import os


def uniform(low: float = 0.0, high: float = 1.0) -> float:
    """Draw from [low, high) with 32 random bits."""
    return low + (high - low) * int.from_bytes(os.urandom(4), "little") / 2**32
