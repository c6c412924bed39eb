"""Answers to uploads, and to the reminders that devices send for unanswered ones; requests for missing chunks.

`Answers` sends each answer to an upload once, and again when the device asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from aggregator.membership import AggregatorMembership
from aggregator.publisher import Publisher, first_reminder_s
from aggregator.rounds.state import EngineState, too_late
from aggregator.storage.store import UploadRef
from aggregator.uploads.states import ANSWERED, UploadEvent, UploadState, UploadTable
from shoal import limits
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Action, Reminder
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.reassembly import Reassembler

ACTIONS: Final[Mapping[UploadState, Action]] = {
    UploadState.ACKNOWLEDGED: Action.ACK,
    UploadState.REFUSED: Action.REFUSED,
}


PAUSE_S: Final = 0.9 * limits.REMIND_BASE_S
"""Least time between two reminders of one device. An honest device never sends them faster, so faster ones are ignored."""


class _Request(NamedTuple):
    """The latest request to a device: for which transfer, after which of its reminders, and when."""

    transfer: bytes
    turn: int
    at_s: float


_NO_REQUEST: Final = _Request(b"", 0, -math.inf)


class Answers:
    """Acknowledges and refuses the uploads of one run, and asks for missing chunks of those that stall or are reminded of.

    A device sends a reminder once the broker has accepted its whole upload, and a broker keeps the order of a topic.
    Therefore every chunk that has not arrived before the reminder is lost, however slow the link is, and is requested
    at once. Chunks requested earlier may still be in transit after reminders that were sent before the request arrived.
    The reminder's retransmission counter identifies those; they cause no request for `limits.REMIND_CAP_S`.

    Args:
        chunks: the incomplete transfers.
        publisher: seals and sends the messages.
        membership: the roster; a device that it does not list is sent nothing.
        run: the owner's plan.
        table: the states of the uploads, and with them the answers already given.
    """

    def __init__(
        self,
        chunks: Reassembler,
        publisher: Publisher,
        membership: AggregatorMembership,
        run: RunPlan,
        table: UploadTable,
    ) -> None:
        self._chunks = chunks
        self._publisher = publisher
        self._membership = membership
        self._run = run
        self._table = table
        self._owed: set[tuple[str, int]] | None = None
        self._reminded_s: dict[str, float] = {}
        self._requested: dict[str, _Request] = {}

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
        self._repeat(ref, round_)

    def _repeat(self, ref: UploadRef, round_: int) -> None:
        """Send the answer to an upload that is ACKNOWLEDGED or REFUSED."""
        self._tell(ref.device, round_, ref.transfer, ACTIONS[self._table.state(ref)], self._table.reason(ref))

    def _tell(
        self,
        device: str,
        round_: int,
        transfer: bytes,
        action: Action,
        reason: str,
        missing: tuple[int, ...] = (),
    ) -> None:
        member = self._membership.roster.device(device)
        if member is not None:
            self._publisher.answer(member, self._run, round_, transfer, action, reason, missing)

    def is_too_soon(self, device: str, now_s: float) -> bool:
        """Return whether an authentic reminder of ``device`` came less than PAUSE_S ago: another is dropped unopened."""
        return now_s - self._reminded_s.get(device, -math.inf) < PAUSE_S

    def on_reminder(self, reminder: Reminder, state: EngineState, now_s: float, most_bytes: int) -> None:
        """Answer an authentic reminder, or request the chunks that are missing.

        Args:
            reminder: the reminder.
            state: of the run.
            now_s: the time.
            most_bytes: largest upload that the device may send. A larger one is refused: its chunks are refused, so it
                could never arrive.
        """
        device = reminder.device
        if self.is_too_soon(device, now_s):
            return
        self._reminded_s[device] = now_s
        if reminder.run_id != self._run.run_id:
            if not state.finished:  # a finished run that is only answered for can't know whether the other was stopped
                # The table has no entry for it, because it holds this run's uploads only.
                self._tell(device, reminder.round, reminder.transfer, Action.REFUSED, "of another run")
            return
        ref = UploadRef(device, reminder.transfer)
        upload_state = self._table.state(ref)
        if upload_state in ANSWERED:
            self._repeat(ref, reminder.round)
        elif upload_state is UploadState.RECEIVING and not self._answer_unreceived(ref, reminder, state, most_bytes):
            self._request_missing(reminder, now_s)

    def _answer_unreceived(self, ref: UploadRef, reminder: Reminder, state: EngineState, most_bytes: int) -> bool:
        """Answer an upload whose chunks are not needed; return whether it was answered."""
        stored = state.received.get(ref.device)
        if stored is not None and stored[1] == reminder.digest:
            self.answer(ref, reminder.round, UploadEvent.FOUND_STORED)
            return True
        reason = ""
        # Between two rounds, the next one is the earliest to which an upload can still belong.
        earliest_round = state.round if state.plan is not None else state.round + 1
        if state.finished or reminder.round < earliest_round:
            reason = too_late(state)
        elif reminder.size > most_bytes:
            reason = f"an upload of {reminder.size} bytes is above {most_bytes}"
        if reason:
            self.answer(ref, reminder.round, UploadEvent.REJECTED, reason)
        return bool(reason)

    def _request_missing(self, reminder: Reminder, now_s: float) -> None:
        """Request the missing chunks of the reminder's upload, unless an earlier request for them is still open."""
        device, transfer = reminder.device, reminder.transfer
        last = self._requested.get(device, _NO_REQUEST)
        if last.transfer == transfer and reminder.turn <= last.turn and now_s - last.at_s < limits.REMIND_CAP_S:
            return
        self._requested[device] = _Request(transfer, reminder.turn, now_s)
        missing = self._chunks.missing(device, reminder.round, transfer, reminder.size, reminder.chunk_bytes, now_s)
        self._tell(device, reminder.round, transfer, Action.NACK, "chunks missing", missing)

    def on_disconnect(self) -> None:
        """Forget the requests made so far: the broker may have lost them."""
        self._requested.clear()

    def tick(self, state: EngineState, now_s: float) -> None:
        """Request the missing chunks of stalled uploads; the larger the round, the later an upload counts as stalled."""
        uploads = 0 if state.plan is None else len(state.plan.assignments)
        patience_s = first_reminder_s(uploads, encoded_bytes(self._run.length, self._run.recipe.precision_up))
        for stalled in self._chunks.stalled(now_s, max(limits.REASSEMBLY_QUIET_S, patience_s)):
            device, transfer = stalled.source, stalled.transfer_id
            if self._table.state(UploadRef(device, transfer)) is UploadState.RECEIVING:
                self._tell(device, stalled.round, transfer, Action.NACK, "chunks missing", stalled.missing)
            else:  # a second copy in chunks of another length, of which the device will send no more
                self._chunks.drop(device, transfer)
