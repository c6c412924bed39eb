"""IFCA's saving of communication: devices get all k models, or only their own (ifca extended, section 4.3).

Once no device has changed its identity in ``stable_rounds`` full broadcasts, devices are sent the model of their own
cluster only. Every ``probe_every``-th round is a full broadcast again; a device that then chooses another cluster, or
one that is asked to choose for another reason and changes, turns the full broadcast on for all. A device that has not
chosen since the last change, a newcomer for instance, is always sent all models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Stability of the devices' cluster identities.

    Attributes:
        stable: full broadcasts in a row without a change; a round in which no device chose again does not count.
        quiet: rounds since the last full broadcast.
        confirmed: devices that have chosen among all models since the last change.
    """

    stable: int = 0
    quiet: int = 0
    confirmed: frozenset[str] = frozenset()

    def narrow(self, stable_rounds: int, probe_every: int) -> bool:
        """Whether the coming round is not a full broadcast."""
        return self.settled(stable_rounds) and self.quiet < probe_every - 1

    def probes_next(self, stable_rounds: int, probe_every: int) -> bool:
        """Whether the coming round is not a full broadcast, and the one after it is."""
        return self.settled(stable_rounds) and self.quiet == probe_every - 2

    def settled(self, stable_rounds: int) -> bool:
        """Whether identities count as stable; 0 rounds is never."""
        return 0 < stable_rounds <= self.stable

    def observed(self, chosen: Mapping[str, int], before: Mapping[str, int], *, full: bool) -> Broadcast:
        """Return the state after a round.

        Args:
            chosen: cluster by device, of those that chose among all models in this round.
            before: each device's cluster as of the round before.
            full: whether every assignment named all models.
        """
        again = {device: before[device] for device in chosen if device in before}
        if any(chosen[device] != cluster for device, cluster in again.items()):
            return Broadcast()
        return dataclasses.replace(
            self,
            stable=self.stable + (full and bool(again)),
            quiet=0 if full else self.quiet + 1,
            confirmed=self.confirmed.union(chosen),
        )
