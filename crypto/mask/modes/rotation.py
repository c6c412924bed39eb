"""Mode ``rotation``: spread every coordinate over thousands of others, which hides values and layers.

y = S2 H P S1 H S0 x: secret signs S, Hadamard blocks H, a secret permutation P, after the randomised Hadamard transform
of Ailon and Chazelle (The fast Johnson-Lindenstrauss transform, 2009). One round of signs and blocks does not mix the
blocks with each other; the permutation between two rounds does. There is no proof of security; docs/threat-model.md lists
the attacks that were tried.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from crypto.mask.hadamard import transform, untransform
from crypto.mask.modes.base import Mode, Subkey
from crypto.mask.modes.permutation import Permutation
from crypto.mask.stream import Signs, permutation
from shoal.types import Float32Vector


class Rotation:
    """Two rounds of signs and Hadamard blocks around a permutation: 4.4 bytes a coordinate, and 4 more while it runs."""

    __slots__ = ("_permutation", "_signs")

    def __init__(self, shuffle: Permutation, signs: tuple[Signs, Signs, Signs]) -> None:
        """Store a permutation, and three vectors of as many signs."""
        self._permutation, self._signs = shuffle, signs

    @property
    def length(self) -> int:
        """Coordinates."""
        return self._permutation.length

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the masked ``source`` to ``out``, both shape (length,), float32."""
        first, middle, last = self._signs
        work = np.empty_like(out)
        first.flip(source, work)
        transform(work)
        middle.flip(work, work)
        self._permutation.apply(work, out)
        transform(out)
        last.flip(out, out)

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the unmasked ``source`` to ``out``, both shape (length,), float32."""
        first, middle, last = self._signs
        work = np.empty_like(out)
        last.flip(source, work)
        untransform(work)
        self._permutation.invert(work, out)
        middle.flip(out, out)
        untransform(out)
        first.flip(out, out)

    def __repr__(self) -> str:
        return f"Rotation(length={self.length}, index=<redacted>, signs=<redacted>)"


def _build(subkey: Subkey, length: int) -> Rotation:
    shuffle = Permutation(permutation(subkey("rotation/index"), length))
    first, middle, last = (Signs(subkey(f"rotation/signs-{place}"), length) for place in range(3))
    return Rotation(shuffle, (first, middle, last))


MODE: Final = Mode("rotation", _build, exact=False)
