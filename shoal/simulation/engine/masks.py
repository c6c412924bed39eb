"""The masks of a simulated run: a fresh one for each round, by the key schedule of fleets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from crypto.mask.derivation import MaskKey, derive
from crypto.mask.schedule import VersionKey

if TYPE_CHECKING:
    from shoal.types import Segment

KEY_VERSION: Final = 1


class RoundMasks:
    """Derives the masks of a run's rounds from its seed.

    They hide nothing: in a simulation masks only show that strategies work on masked vectors.
    """

    def __init__(
        self, *, fleet: str, run_id: bytes, seed: int, task_digest: bytes, mode: str, segments: tuple[Segment, ...]
    ) -> None:
        """Begin at round 1; the arguments are those of `crypto.mask.derivation.MaskContext`, and the run's seed."""
        self._chain = VersionKey(fleet, KEY_VERSION, seed.to_bytes(32, "little")).begin_run(run_id, 1)
        self._task_digest, self._mode, self._segments = task_digest, mode, segments

    def take(self, round_: int) -> MaskKey:
        """Return the mask of a round, which is later than the one before.

        Raises:
            IntegrityError: it is not.
        """
        self._chain.skip_to(round_)
        keys = self._chain.take()
        return derive(keys.mask, keys.context(self._task_digest, self._mode, self._segments))
