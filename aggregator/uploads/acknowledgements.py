"""What devices are told about their uploads, and told again when they ask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from aggregator.membership import AggregatorMembership
from aggregator.publisher import Publisher
from aggregator.uploads.validation import Opened
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Action

ANSWERS_REMEMBERED: Final = 16_384
"""Some rounds of a large fleet: a device whose answer is forgotten has to send its upload again to get it."""


class Answers:
    """Answers uploads of one run; remembers the latest."""

    def __init__(self, publisher: Publisher, membership: AggregatorMembership, run: RunPlan) -> None:
        self._publisher = publisher
        self._membership = membership
        self._run = run
        self._owed: set[tuple[str, int]] | None = None
        # A plain dict takes ever longer to find its first entry once earlier ones were deleted.
        self._given: OrderedDict[tuple[str, bytes], tuple[Action, str]] = OrderedDict()

    def end(self, round_: int, missing: Iterable[str]) -> None:
        """Take note that the run ended with this round, and without these devices."""
        self._owed = {(device, round_) for device in missing}

    @property
    def all_given(self) -> bool:
        """Whether the run has ended here and every device was told what became of its part in the final round."""
        return self._owed == set()

    def give(self, opened: Opened, action: Action, reason: str = "") -> None:
        """Answer an upload that was opened."""
        self.reply(opened.upload.device, opened.upload.round, opened.transfer, action, reason)

    def reply(self, device: str, round_: int, transfer: bytes, action: Action, reason: str = "") -> None:
        """Tell ``device`` what became of a transfer; one that is not in the roster is told nothing."""
        member = self._membership.roster.device(device)
        if member is None:
            return
        if len(self._given) >= ANSWERS_REMEMBERED and (device, transfer) not in self._given:
            self._given.popitem(last=False)
        self._given[device, transfer] = action, reason
        if self._owed is not None:
            self._owed.discard((device, round_))
        self._publisher.answer(member, self._run, round_, transfer, action, reason)

    def given(self, device: str, transfer: bytes) -> bool:
        """Whether ``device`` was answered this transfer, as far as we remember."""
        return (device, transfer) in self._given

    def again(self, device: str, round_: int, transfer: bytes) -> bool:
        """Answer again if ``transfer`` was answered; return whether it was."""
        given = self._given.get((device, transfer))
        member = self._membership.roster.device(device)
        if given is not None and member is not None:
            self._publisher.answer(member, self._run, round_, transfer, *given)
        return given is not None
