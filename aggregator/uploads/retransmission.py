"""What the aggregator asks of devices whose upload has not arrived whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from aggregator.publisher import first_reminder_s
from aggregator.rounds.state import too_late
from shoal import limits
from shoal.protocol.chunking import chunk_count
from shoal.protocol.messages import Action
from shoal.protocol.reassembly import MAX_MISSING_LISTED

if TYPE_CHECKING:
    from aggregator.membership import AggregatorMembership
    from aggregator.publisher import Publisher
    from aggregator.rounds.state import EngineState
    from aggregator.uploads.acknowledgements import Answers
    from aggregator.uploads.commit_queue import Landing
    from shoal.protocol.documents import RunPlan
    from shoal.protocol.messages import Reminder
    from shoal.protocol.reassembly import Reassembler

PAUSE_S: Final = 0.9 * limits.REMIND_BASE_S
"""A device's reminders that come faster are passed over: no device makes them."""


class _Asked(NamedTuple):
    """What a device was asked for last, after which of its turns, and when."""

    transfer: bytes
    turn: int
    at_s: float


_NOTHING: Final = _Asked(b"", 0, -math.inf)


class Asking:
    """Asks for missing chunks: of a transfer that has stalled, and of an upload whose device reminds us of it.

    A device reminds us when the broker has taken all that it sent, and a broker keeps the order of a topic. So what has not
    come before the reminder is lost, however slow the link, and is asked for at once. What was asked for may be on its way
    behind reminders that were sent before: those are known by their turn and passed over, for `limits.REMIND_CAP_S`.
    """

    def __init__(
        self,
        chunks: Reassembler,
        landing: Landing,
        answers: Answers,
        publisher: Publisher,
        membership: AggregatorMembership,
        run: RunPlan,
    ) -> None:
        self._chunks = chunks
        self._landing = landing
        self._answers = answers
        self._publisher = publisher
        self._membership = membership
        self._run = run
        self._reminded_s: dict[str, float] = {}
        self._asked: dict[str, _Asked] = {}

    def is_too_soon(self, device: str, now_s: float) -> bool:
        """Return whether a reminder of ``device`` is to be dropped unopened: an authentic one came less than PAUSE_S ago."""
        return now_s - self._reminded_s.get(device, -math.inf) < PAUSE_S

    def remind(self, reminder: Reminder, state: EngineState, now_s: float, most_bytes: int) -> None:
        """Take a reminder of the device that it names, while the run is in ``state``: answer it, or ask for what is missing.

        An upload of more than ``most_bytes`` is refused: its chunks are, so it can never arrive.
        """
        device, transfer = reminder.device, reminder.transfer
        if self.is_too_soon(device, now_s):
            return
        self._reminded_s[device] = now_s
        if reminder.run_id != self._run.run_id:
            if not state.finished:  # a run that is only looked back to knows nothing of those after it
                self._refuse_other_run(reminder)
            return
        if self._answers.again(device, reminder.round, transfer):
            return
        if self._is_landing(device, transfer):
            return
        verdict = self._verdict(reminder, state)
        if verdict is not None:
            self._answers.reply(device, reminder.round, transfer, *verdict)
            return
        if reminder.size > most_bytes:
            reason = f"an upload of {reminder.size} bytes is above {most_bytes}"
            self._answers.reply(device, reminder.round, transfer, Action.REFUSED, reason)
            return
        last = self._asked.get(device, _NOTHING)
        if last.transfer == transfer and reminder.turn <= last.turn and now_s - last.at_s < limits.REMIND_CAP_S:
            return
        self._asked[device] = _Asked(transfer, reminder.turn, now_s)
        missing = self._chunks.missing(device, reminder.round, transfer, reminder.size, reminder.chunk_bytes, now_s)
        if missing is None:
            count = chunk_count(reminder.size, reminder.chunk_bytes)
            missing = tuple(range(min(count, MAX_MISSING_LISTED)))
        self._ask(device, reminder.round, transfer, missing)

    def _verdict(self, reminder: Reminder, state: EngineState) -> tuple[Action, str] | None:
        """Return the answer to an upload that need not travel any more, None if there is none yet."""
        if reminder.device in state.received and state.received[reminder.device][1] == reminder.digest:
            return Action.ACK, ""
        if state.finished or reminder.round < state.round + (state.plan is None):
            return Action.REFUSED, too_late(state)
        return None

    def _refuse_other_run(self, reminder: Reminder) -> None:
        member = self._membership.roster.device(reminder.device)
        if member is not None:
            refused = (reminder.round, reminder.transfer, Action.REFUSED, "of another run")
            self._publisher.answer(member, self._run, *refused)

    def forget(self) -> None:
        """Take note that the broker was lost, and with it maybe what was asked."""
        self._asked.clear()

    def tick(self, state: EngineState, now_s: float) -> None:
        """Ask for the missing chunks of transfers that have stalled; in a large round the others may just be on their way."""
        uploads = 0 if state.plan is None else len(state.plan.orders)
        patience_s = first_reminder_s(uploads, 4 * self._run.length)
        for stalled in self._chunks.stalled(now_s, max(limits.REASSEMBLY_QUIET_S, patience_s)):
            device, transfer = stalled.source, stalled.transfer_id
            if self._answers.given(device, transfer) or self._is_landing(device, transfer):
                # Sent again while the first copy was on its way to the disk.
                self._chunks.drop(device, transfer)
            else:
                self._ask(device, stalled.round, transfer, stalled.missing)

    def _is_landing(self, device: str, transfer: bytes) -> bool:
        queued = self._landing.of(device)
        return queued is not None and queued.transfer == transfer

    def _ask(self, device: str, round_: int, transfer: bytes, missing: tuple[int, ...]) -> None:
        member = self._membership.roster.device(device)
        if member is not None:
            self._publisher.ask_again(member, self._run, round_, transfer, missing)
