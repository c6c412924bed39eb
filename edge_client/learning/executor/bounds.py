"""Limits on the memory of a graph's values, checked before an operator takes it.

A tensor has at most MAX_ELEMENTS, as a received model has at most that many coordinates; all values of a graph that are alive
at one time take at most MAX_LIVE_BYTES, with views counted as if they were copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from shoal.errors import TaskError
from shoal.limits import MAX_COORDINATES

MAX_ELEMENTS: Final = MAX_COORDINATES
"""Most elements of one tensor."""

MAX_LIVE_BYTES: Final = 8 * 4 * MAX_COORDINATES
"""Most bytes of all values alive at one time: eight models of the largest length."""


def checked(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as a tuple.

    Raises:
        TaskError: it is negative in a dimension, or has more than MAX_ELEMENTS.
    """
    if min(shape, default=0) < 0:
        raise TaskError(f"a tensor of the negative shape {tuple(shape[:8])}")
    if math.prod(shape) > MAX_ELEMENTS:
        raise TaskError(f"a tensor of shape {tuple(shape[:8])} has more than {MAX_ELEMENTS} elements")
    return tuple(shape)


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which two shapes broadcast; many times as fast as numpy's own function of arrays.

    Raises:
        TaskError: they do not broadcast, or as for `checked`.
    """
    if a == b or not b:
        return a
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    lead = len(longer) - len(shorter)
    result = list(longer)
    for place, n in enumerate(shorter, lead):
        if n != result[place]:
            if n != 1 and result[place] != 1:
                raise TaskError(f"shapes {a} and {b} do not fit together")
            result[place] = n if result[place] == 1 else result[place]
    return checked(result)
