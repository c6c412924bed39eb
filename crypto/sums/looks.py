"""Sketches of updates, with which a keeper compares them without seeing one: see `crypto.sums.deals`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from crypto.sums.ring import Words, add_pad
from shoal.limits import SKETCH_WORDS

if TYPE_CHECKING:
    from shoal.types import Float32Vector

SKETCH: Final = SKETCH_WORDS
LENGTH: Final = 1 << 14
"""Length of a sketch: its coordinates are rounded to some 1/700 of their mean size, and a product is below 2^29."""
SKETCH_PART: Final = 1
"""Part of a pad's seed that hides the sketch; 0 hides the update."""


def sketch(update: Float32Vector) -> Words:
    """Return the sketch of a rotated update (d,): evenly spaced coordinates, as integers of length `LENGTH`, (SKETCH,) uint32.

    Where d is less than `SKETCH`, zeros follow all of them.
    """
    size = min(SKETCH, len(update))
    chosen = update[np.arange(size) * len(update) // size].astype(np.float64)
    norm = float(np.linalg.norm(chosen))
    words = np.zeros(SKETCH, np.uint32)
    words[:size] = np.rint(chosen * (LENGTH / norm if norm else 0.0)).astype(np.int64).astype(np.uint32)
    return words


def hidden_sketch(update: Float32Vector, seed: bytes) -> Words:
    """Return the sketch of a rotated update (d,) under the pad of ``seed``, (SKETCH,) uint32."""
    words = sketch(update)
    add_pad(words, seed, SKETCH_PART)
    return words
