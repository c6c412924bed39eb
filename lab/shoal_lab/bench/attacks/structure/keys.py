"""Masks of a run's rounds under either key lifetime: a fresh key in each round, as fleets have, or one key for the run.

One key a run is for comparison only: it shows what fresh keys are good for. It is the key of round 1, used in all rounds; no
fleet has it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from crypto.mask.derivation import MaskKey
from crypto.mask.masking import mask, unmask
from shoal.types import MaskedVector
from shoal_lab.bench.attacks.lab import Lab

Lifetime = Literal["run", "round"]
LIFETIMES: Final[tuple[Lifetime, ...]] = ("run", "round")

Rows = NDArray[np.float32]


class FleetKeys:
    """The keys that a run's devices share, by round."""

    def __init__(self, lab: Lab, mode: str, lifetime: Lifetime, length: int, owner: str = "fleet") -> None:
        """Prepare keys for vectors of ``length`` coordinates; another ``owner`` has independent keys."""
        self.mode, self.lifetime, self.length = mode, lifetime, length
        self._derive = lru_cache(maxsize=4)(lambda round_: lab.derive(mode, length, round_, owner))

    def key(self, round_: int) -> MaskKey:
        """Return the mask key of a round; under lifetime ``run`` every round has that of round 1."""
        return self._derive(round_ if self.lifetime == "round" else 1)

    def masked(self, rows: Rows, round_: int) -> Rows:
        """Return ``rows`` (n, d) masked under a round's key."""
        key = self.key(round_)
        return np.stack([mask(np.ascontiguousarray(row, np.float32), key).values for row in rows])

    def unmasked(self, rows: Rows, round_: int) -> Rows:
        """Return ``rows`` (n, d) without the mask of a round's key."""
        key = self.key(round_)
        return np.stack([unmask(MaskedVector(np.ascontiguousarray(row, np.float32), key.key_id), key) for row in rows])

    def places(self, round_: int) -> NDArray[np.int64]:
        """Return the clear coordinate that each masked one copies, up to sign, (d,), int64; -1 for a mixture."""
        ramp = np.arange(1, self.length + 1, dtype=np.float32)
        image = np.abs(self.masked(ramp[None], round_)[0])
        copied = np.array_equal(np.sort(image), ramp)
        return image.astype(np.int64) - 1 if copied else np.full(self.length, -1, np.int64)
