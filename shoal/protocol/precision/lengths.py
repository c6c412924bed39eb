"""Sizes and figures of each precision, without numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from shoal import limits
from shoal.errors import WireError

BLOCK: Final = 256
"""Coordinates of ``int8`` that share a scale."""
SCALE_BYTES: Final = 4
FEEDBACK: Final = ("int8",)
"""Precisions whose rounding error a device adds to its next update; that of float16 is below the noise of training."""

_BYTES: Final[Mapping[str, Callable[[int], int]]] = MappingProxyType(
    {
        "float32": lambda length: 4 * length,
        "float16": lambda length: 2 * length,
        "int8": lambda length: length + SCALE_BYTES * -(-length // BLOCK),
    }
)
_ROOM: Final[Mapping[str, float]] = MappingProxyType({"float32": 1.0, "float16": 1.001, "int8": 1.13})


def encoded_bytes(length: int, precision: str) -> int:
    """Return the bytes of a vector of ``length`` coordinates: none for no coordinates.

    Raises:
        WireError: no such precision, or a length that is negative or above `limits.MAX_COORDINATES`.
    """
    require(precision)
    if not 0 <= length <= limits.MAX_COORDINATES:
        raise WireError(f"a vector of {length} coordinates")
    return _BYTES[precision](length) if length else 0


def norm_room(precision: str) -> float:
    """Return how many times longer a decoded vector may be than the vector that was encoded.

    Rounding in blocks adds up to sqrt(256) / 127 of the norm.

    Raises:
        WireError: no such precision.
    """
    require(precision)
    return _ROOM[precision]


def require(precision: str) -> None:
    """Check the name of a precision.

    Raises:
        WireError: there is no such precision.
    """
    if precision not in limits.PRECISIONS:
        raise WireError(f"no precision {precision!r}", hint=f"there are {', '.join(limits.PRECISIONS)}")
