"""The interface of a mask mode. Each mode is a module that implements it; ``registry`` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.types import Float32Vector

Subkey = Callable[[str], bytes]
"""Returns a segment's 32-byte key for a purpose; each purpose has its own key."""


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
        """Undo ``apply``: write the unmasked ``source`` to ``out``.

        Args:
            source: shape (length,), float32, C-contiguous.
            out: shape (length,), float32, C-contiguous, apart from ``source`` in memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of mask.

    Attributes:
        name: the name in run plans.
        build: makes the transform of one segment from its subkeys and its length.
        exact: whether it only moves coordinates and flips signs. Masking and unmasking then restores the same bits, and
            so does the mean of masked vectors, except for the sign of a zero. Otherwise both are right to a relative l2
            error of 1e-6.
    """

    name: str
    build: Callable[[Subkey, int], Transform]
    exact: bool
