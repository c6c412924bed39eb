"""Mode ``none``: the identity. Updates are still sealed against the broker, but the aggregator sees each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from crypto.mask.modes.base import Mode, Subkey
from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True)
class Identity:
    """Copies the segment unchanged.

    Attributes:
        length: coordinates.
    """

    length: int

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Copy ``source`` to ``out``, both shape (length,), float32."""
        np.copyto(out, source)

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Copy ``source`` to ``out``, both shape (length,), float32."""
        np.copyto(out, source)


def _build(_subkey: Subkey, length: int) -> Identity:
    return Identity(length)


MODE: Final = Mode("none", _build, exact=True)
