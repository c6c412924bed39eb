"""Never back: the highest roster, run and round that a party has accepted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from wire.errors import UntrustedError
from wire.messages import Announcement


@dataclass(frozen=True, slots=True)
class HighWater:
    """What a device has seen; it keeps this across restarts.

    Attributes:
        roster, run, round: the highest accepted; nonce: of that round, 16 bytes.
    """

    roster: int = 0
    run: int = 0
    round: int = 0
    nonce: bytes = b""

    def accept(self, announcement: Announcement) -> HighWater:
        """Return the new mark for an announcement that does not go back.

        The same round may be announced again (the aggregator restarted), but only as the same round: with the same nonce.

        Raises:
            UntrustedError: an older roster, run or round, or another round under the same number.
        """
        a = announcement
        if a.roster_sequence < self.roster:
            raise UntrustedError(f"an announcement under roster {a.roster_sequence} after {self.roster}")
        if (a.run, a.round) < (self.run, self.round):
            raise UntrustedError(f"run {a.run} round {a.round} announced after run {self.run} round {self.round}")
        if (a.run, a.round) == (self.run, self.round) and a.nonce != self.nonce:
            raise UntrustedError(f"run {a.run} round {a.round} announced twice, differently")
        return dataclasses.replace(self, roster=a.roster_sequence, run=a.run, round=a.round, nonce=a.nonce)
