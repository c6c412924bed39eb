"""What the aggregator asks of devices whose upload has not arrived whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wire import limits
from wire.messages import Action
from wire.reassembly import MAX_MISSING_LISTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aggregator.answers import Answers
    from aggregator.landing import Landing
    from aggregator.membership import AggregatorMembership
    from aggregator.publisher import Publisher
    from wire.documents import RunPlan
    from wire.messages import Phase, Reminder
    from wire.reassembly import Reassembler


class Asking:
    """Asks for missing chunks: of a transfer that has stalled, and of an upload whose device reminds us of it.

    A device reminds us when the broker has taken all that it sent, and a broker keeps the order of a topic. So what has not
    come before the reminder is lost, however slow the link, and is asked for at once; a device is asked at most once in
    `REASSEMBLY_QUIET_S`, whoever plays its reminders again.
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
        self._asked_s: dict[str, float] = {}

    def remind(self, reminder: Reminder, received: Mapping[str, tuple[Phase, bytes]], now_s: float) -> None:
        """Take a reminder of the device that it names: answer it, or ask for what is missing.

        ``received`` is device -> (phase, digest) of the durable uploads of the open round.
        """
        device, transfer = reminder.device, reminder.transfer
        if self._answers.again(device, reminder.round, transfer):
            return
        if device in received and received[device][1] == reminder.digest:
            self._answers.reply(device, reminder.round, transfer, Action.ACK)
            return
        queued = self._landing.of(device)
        if queued is not None and queued.transfer == transfer:
            return
        if now_s - self._asked_s.get(device, -math.inf) < limits.REASSEMBLY_QUIET_S:
            return
        self._asked_s[device] = now_s
        missing = self._chunks.missing(device, transfer, now_s)
        if missing is None:
            missing = tuple(range(min(reminder.chunks, MAX_MISSING_LISTED)))
        self._ask(device, reminder.round, transfer, missing)

    def tick(self, now_s: float) -> None:
        """Ask for the missing chunks of what has stalled."""
        for stalled in self._chunks.stalled(now_s):
            if self._answers.given(stalled.source, stalled.transfer_id):
                # Sent again while the first copy was on its way to the disk.
                self._chunks.drop(stalled.source, stalled.transfer_id)
            else:
                self._ask(stalled.source, stalled.round, stalled.transfer_id, stalled.missing)

    def _ask(self, device: str, round_: int, transfer: bytes, missing: tuple[int, ...]) -> None:
        member = self._membership.roster.device(device)
        if member is not None:
            self._publisher.ask_again(member, self._run, round_, transfer, missing)
