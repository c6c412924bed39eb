"""Replay protection: a watermark of the highest roster, run and round that a party has accepted."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import UntrustedError
from shoal.protocol.messages import Announcement
from shoal.protocol.states import NO_TRANSCRIPT


@dataclass(frozen=True, slots=True)
class ReplayWatermark:
    """A device's replay watermark, stored across restarts.

    Attributes:
        roster, run, round: the highest accepted ones; nonce: 16 bytes of that round.
        transcript: the head of the run's transcript after that round, 32 bytes.
    """

    roster: int = 0
    run: int = 0
    round: int = 0
    nonce: bytes = b""
    transcript: bytes = NO_TRANSCRIPT

    @property
    def place(self) -> tuple[int, int]:
        """Run and round; this position never decreases."""
        return (self.run, self.round)

    def accept(self, announcement: Announcement) -> ReplayWatermark:
        """Return the watermark after ``announcement``.

        A round may be announced again after the aggregator restarts, with the same nonce.

        Raises:
            UntrustedError: an older roster, run or round, or another round under the same number.
        """
        a = announcement
        if a.roster_sequence < self.roster:
            raise UntrustedError(f"an announcement under roster {a.roster_sequence} after {self.roster}")
        if a.place < self.place:
            raise UntrustedError(f"run {a.run} round {a.round} announced after run {self.run} round {self.round}")
        if a.place == self.place and a.nonce != self.nonce:
            raise UntrustedError(f"run {a.run} round {a.round} announced twice, differently")
        return ReplayWatermark(a.roster_sequence, a.run, a.round, a.nonce, a.held.transcript)
