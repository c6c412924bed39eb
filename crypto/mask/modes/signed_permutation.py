"""Mode ``signed-permutation``: permute the coordinates of each segment and flip about half of the signs.

Hides the signs of values, so that layers whose values have one sign can't be recognised by it; absolute values still show.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from crypto.mask.modes.base import Mode, Subkey
from crypto.mask.modes.permutation import Permutation
from crypto.mask.stream import Signs, permutation
from shoal.types import Float32Vector


class SignedPermutation:
    """``out[i] = sign[i] * source[index[i]]``; takes one bit a coordinate more than the permutation."""

    __slots__ = ("_permutation", "_signs")

    def __init__(self, shuffle: Permutation, signs: Signs) -> None:
        """Store a permutation and as many signs."""
        self._permutation, self._signs = shuffle, signs

    @property
    def length(self) -> int:
        """Coordinates."""
        return self._permutation.length

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the masked ``source`` to ``out``, both shape (length,), float32."""
        self._permutation.apply(source, out)
        self._signs.flip(out, out)

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the unmasked ``source`` to ``out``, both shape (length,), float32."""
        work = np.empty_like(out)
        self._signs.flip(source, work)
        self._permutation.invert(work, out)

    def __repr__(self) -> str:
        return f"SignedPermutation(length={self.length}, index=<redacted>, signs=<redacted>)"


def _build(subkey: Subkey, length: int) -> SignedPermutation:
    shuffle = Permutation(permutation(subkey("signed-permutation/index"), length))
    return SignedPermutation(shuffle, Signs(subkey("signed-permutation/signs"), length))


MODE: Final = Mode("signed-permutation", _build, exact=True)
