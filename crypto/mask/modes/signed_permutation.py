"""Mode ``signed-permutation``: coordinates change places inside their segment, and half of them their sign.

The signs of values no longer tell layers apart, and a mean of one sign no longer shows; absolute values still do.
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
    """``out[i] = sign[i] * source[index[i]]``: one byte a coordinate more than the permutation."""

    __slots__ = ("_permutation", "_signs")

    def __init__(self, index: NDArray[np.int64], sign: NDArray[np.int8]) -> None:
        """Keep both, shape (length,): int64, a permutation of ``range(length)``; int8, each 1 or -1."""
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
        """Write the clear vector behind ``source`` to ``out``, both shape (length,), float32."""
        self._permutation.invert(source * self._signs, out)

    def __repr__(self) -> str:
        return f"SignedPermutation(length={self.length}, index=<redacted>, signs=<redacted>)"


def _build(subkey: Subkey, length: int) -> SignedPermutation:
    index = permutation(subkey("signed-permutation/index"), length)
    return SignedPermutation(index, signs(subkey("signed-permutation/signs"), length))


MODE: Final = Mode("signed-permutation", _build, exact=True)
