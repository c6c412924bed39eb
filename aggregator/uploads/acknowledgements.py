"""The aggregator's answers to uploads: sent once, and repeated on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from aggregator.membership import AggregatorMembership
from aggregator.publisher import Publisher
from aggregator.storage.upload import UploadRef
from aggregator.uploads.states import UploadEvent, UploadState, UploadTable
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Action

ACTIONS: Final[Mapping[UploadState, Action]] = {
    UploadState.ACKNOWLEDGED: Action.ACK,
    UploadState.REFUSED: Action.REFUSED,
}


class Acknowledgements:
    """Acknowledges and refuses the uploads of one run.

    Args:
        publisher: seals and sends the answers.
        membership: the roster; a device that it does not list is sent nothing.
        run: the owner's plan.
        table: the states of the uploads, and with them the answers already given.
    """

    def __init__(
        self, publisher: Publisher, membership: AggregatorMembership, run: RunPlan, table: UploadTable
    ) -> None:
        self._publisher = publisher
        self._membership = membership
        self._run = run
        self._table = table
        self._owed: set[tuple[str, int]] | None = None

    def end(self, round_: int, missing: Iterable[str]) -> None:
        """Record that the run ended with this round, and that these devices did not take part in it."""
        self._owed = {(device, round_) for device in missing}

    @property
    def complete(self) -> bool:
        """Whether the run has ended and every device was answered for the final round."""
        return self._owed == set()

    def answer(self, ref: UploadRef, round_: int, event: UploadEvent, reason: str = "") -> None:
        """Move an upload to the state that ``event`` leads to, and tell its device.

        Args:
            ref: the upload.
            round_: its round.
            event: one that leads to ACKNOWLEDGED or REFUSED.
            reason: of a refusal.
        """
        self._table.move(ref, event, reason)
        if self._owed is not None:
            self._owed.discard((ref.device, round_))
        self.repeat(ref, round_)

    def repeat(self, ref: UploadRef, round_: int) -> None:
        """Send the answer to an upload that is ACKNOWLEDGED or REFUSED."""
        member = self._membership.roster.device(ref.device)
        if member is not None:
            action, reason = ACTIONS[self._table.state(ref)], self._table.reason(ref)
            self._publisher.answer(member, self._run, round_, ref.transfer, action, reason)
