"""Masks of a run's rounds under either key lifetime: one key for the whole run, or a fresh key in each round."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from crypto.mask.derivation import MaskKey, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.schedule import VersionKey
from shoal.bench.attacks.lab import Lab
from shoal.types import MaskedVector, Segment

Lifetime = Literal["run", "round"]
LIFETIMES: Final[tuple[Lifetime, ...]] = ("run", "round")

Rows = NDArray[np.float32]


class FleetKeys:
    """The keys that a run's devices share, by round."""

    def __init__(self, lab: Lab, mode: str, lifetime: Lifetime, length: int, owner: str = "fleet") -> None:
        """Prepare keys for vectors of ``length`` coordinates; another ``owner`` has independent keys."""
        self.mode, self.lifetime, self.length = mode, lifetime, length
        self._secret = lab.secret(owner)
        self._context = dataclasses.replace(lab.context(mode), segments=(Segment("cluster", length),))
        self._derive = lru_cache(maxsize=4)(self._derived)

    def key(self, round_: int) -> MaskKey:
        """Return the mask key of a round; under lifetime ``run`` every round has the same one."""
        return self._derive(round_ if self.lifetime == "round" else 0)

    def _derived(self, round_: int) -> MaskKey:
        c = self._context
        if self.lifetime == "run":
            return derive(self._secret, c)
        chain = VersionKey(c.fleet, 1, self._secret.reveal()).begin_run(c.run_id, first_round=1)
        chain.skip_to(round_)
        keys = chain.take()
        return derive(keys.mask, keys.context(c.task_digest, c.mode, c.segments))

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
