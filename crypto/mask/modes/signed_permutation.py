"""Mode ``signed-permutation``: permute the coordinates of each segment and flip about half of the signs.

Hides the signs of values, so that layers whose values have one sign can't be recognised by it; absolute values still show.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.modes.base import Mode, Subkey
from crypto.mask.modes.permutation import from_index
from crypto.mask.stream import permutation, signs
from shoal.types import Float32Vector


class SignedPermutation:
    """``out[i] = sign[i] * source[index[i]]``; takes one byte a coordinate more than the permutation."""

    __slots__ = ("_permutation", "_signs")

    def __init__(self, index: NDArray[np.int64], sign: NDArray[np.int8]) -> None:
        """Store ``index``, a permutation of ``range(length)``, int64, and ``sign``, int8, each 1 or -1; both shape (length,)."""
        self._permutation = from_index(index)
        self._signs = sign

    @property
    def length(self) -> int:
        """Coordinates."""
        return self._signs.size

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the masked ``source`` to ``out``, both shape (length,), float32."""
        self._permutation.apply(source, out)
        np.multiply(out, self._signs, out=out)

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the unmasked ``source`` to ``out``, both shape (length,), float32."""
        self._permutation.invert(source * self._signs, out)

    def __repr__(self) -> str:
        return f"SignedPermutation(length={self.length}, index=<redacted>, signs=<redacted>)"


def _build(subkey: Subkey, length: int) -> SignedPermutation:
    index = permutation(subkey("signed-permutation/index"), length)
    return SignedPermutation(index, signs(subkey("signed-permutation/signs"), length))


MODE: Final = Mode("signed-permutation", _build, exact=True)
