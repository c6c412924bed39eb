"""Mode ``rotation``: spread every coordinate over thousands of others, which hides values and layers.

y = S2 H P S1 H S0 x: secret signs S, Hadamard blocks H, a secret permutation P, after the randomised Hadamard transform
of Ailon and Chazelle (The fast Johnson-Lindenstrauss transform, 2009). One round of signs and blocks does not mix the
blocks with each other; the permutation between two rounds does. There is no proof of security; docs/threat-model.md lists
the attacks that were tried.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.hadamard import transform, untransform
from crypto.mask.modes.base import Mode, Subkey
from crypto.mask.modes.permutation import from_index
from crypto.mask.stream import permutation, signs
from shoal.types import Float32Vector


class Rotation:
    """Two rounds of signs and Hadamard blocks around a permutation: 7 bytes a coordinate, and 8 more while it runs."""

    __slots__ = ("_permutation", "_signs")

    def __init__(
        self, index: NDArray[np.int64], sign: tuple[NDArray[np.int8], NDArray[np.int8], NDArray[np.int8]]
    ) -> None:
        """Store a permutation of ``range(length)``, shape (length,), int64, and three sign vectors (length,), int8, 1 or -1."""
        self._permutation = from_index(index)
        self._signs = sign

    @property
    def length(self) -> int:
        """Coordinates."""
        return self._permutation.length

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the masked ``source`` to ``out``, both shape (length,), float32."""
        first, middle, last = self._signs
        work = source * first
        transform(work)
        np.multiply(work, middle, out=work)
        self._permutation.apply(work, out)
        transform(out)
        np.multiply(out, last, out=out)

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the unmasked ``source`` to ``out``, both shape (length,), float32."""
        first, middle, last = self._signs
        work = source * last
        untransform(work)
        self._permutation.invert(work, out)
        np.multiply(out, middle, out=out)
        untransform(out)
        np.multiply(out, first, out=out)

    def __repr__(self) -> str:
        return f"Rotation(length={self.length}, index=<redacted>, signs=<redacted>)"


def _build(subkey: Subkey, length: int) -> Rotation:
    index = permutation(subkey("rotation/index"), length)
    first, middle, last = (signs(subkey(f"rotation/signs-{place}"), length) for place in range(3))
    return Rotation(index, (first, middle, last))


MODE: Final = Mode("rotation", _build, exact=False)
