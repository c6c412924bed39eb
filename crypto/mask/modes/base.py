"""What a mask mode must offer: one file a mode implements it, ``registry`` lists it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.types import Float32Vector

Subkey = Callable[[str], bytes]
"""Gives the 32-byte key of one segment for a purpose; each purpose has its own."""


class Transform(Protocol):
    """The secret orthonormal map of one segment."""

    @property
    def length(self) -> int:
        """Coordinates of the segment."""
        ...

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the masked ``source`` to ``out``.

        Args:
            source: shape (length,), float32, C-contiguous.
            out: shape (length,), float32, C-contiguous, apart from ``source`` in memory.
        """
        ...

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Undo ``apply``: write the clear vector behind ``source`` to ``out``.

        Args:
            source: shape (length,), float32, C-contiguous.
            out: shape (length,), float32, C-contiguous, apart from ``source`` in memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to mask.

    Attributes:
        name: as run plans spell it.
        build: makes the transform of one segment from its subkeys and its length.
        exact: only moves and flips coordinates: masked and unmasked again is the same bits, and so is a mean but for the
            sign of a zero. Otherwise both are the same to a relative l2 error of 1e-6.
    """

    name: str
    build: Callable[[Subkey, int], Transform]
    exact: bool
