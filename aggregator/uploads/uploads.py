"""The facade of the package: takes chunks of devices' uploads, stores them, and answers.

See the package's docstring for the states of an upload and the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.events import Declined, Stored
from aggregator.uploads.acknowledgements import Acknowledgements
from aggregator.uploads.commit_queue import CommitQueue
from aggregator.uploads.retransmission import Retransmission
from aggregator.uploads.states import UploadEvent, UploadRef, UploadState, UploadTable
from aggregator.uploads.validation import RefusedUploadError, UploadVerifier
from shoal.errors import UntrustedError
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.messages import DeclineReason

if TYPE_CHECKING:
    from aggregator.inbound import Inbound
    from aggregator.membership import AggregatorMembership
    from aggregator.publisher import Publisher
    from aggregator.rounds.engine import Engine
    from aggregator.rounds.events import Event
    from aggregator.rounds.state import EngineState
    from aggregator.storage.fsync_worker import FsyncWorker
    from aggregator.storage.store import Store
    from aggregator.uploads.commit_queue import Committed
    from aggregator.uploads.validation import VerifiedUpload
    from shoal.protocol.documents import RunPlan
    from shoal.protocol.messages import Upload
    from shoal.protocol.reassembly import Transfer


class EngineDriver(Protocol):
    """The driver of the run's engine (`RunService`), as the uploads see it."""

    @property
    def state(self) -> EngineState:
        """The engine's state."""

    def feed(self, event: Event) -> None:
        """Let the engine handle an event, now or after the commit that is under way."""

    def on_committed(self, stored: Sequence[Stored]) -> None:
        """Let the engine handle durable uploads now."""

    def on_answered(self) -> None:
        """Let the engine handle the events that were held back during the commit."""


class Uploads:
    """The uploads of one run.

    Args:
        run: the owner's plan.
        membership: this aggregator's keys and the roster.
        engine: validates uploads against the open round.
        driver: holds the engine's state and takes its events.
        inbound: reassembles the chunks.
        store: makes uploads durable.
        syncer: waits for the disk.
        publisher: sends answers and requests.
    """

    def __init__(
        self,
        run: RunPlan,
        membership: AggregatorMembership,
        *,
        engine: Engine,
        driver: EngineDriver,
        inbound: Inbound,
        store: Store,
        syncer: FsyncWorker,
        publisher: Publisher,
    ) -> None:
        self._membership = membership
        self._engine = engine
        self._driver = driver
        self._inbound = inbound
        self._table = UploadTable()
        self._verifier = UploadVerifier(membership.identity, run)
        self._queue = CommitQueue(store, syncer, self._table)
        self._answers = Acknowledgements(publisher, membership, run, self._table)
        self._retransmission = Retransmission(
            chunks=inbound.chunks,
            answers=self._answers,
            publisher=publisher,
            membership=membership,
            run=run,
            table=self._table,
        )

    @property
    def committing(self) -> bool:
        """Whether any upload is valid and not yet durable."""
        return self._queue.busy

    @property
    def all_answered(self) -> bool:
        """Whether the run has ended and every device was answered for the final round."""
        return self._answers.complete

    def end(self, round_: int, missing: Iterable[str]) -> None:
        """Record that the run ended with this round, and that these devices did not take part in it."""
        self._answers.end(round_, missing)

    def state(self, device: str, transfer: bytes) -> UploadState:
        """Return the state of an upload."""
        return self._table.state(UploadRef(device, transfer))

    def receive(self, device: str, chunk: bytes, now_s: float) -> None:
        """Take one chunk of an upload, a reminder or a decline.

        Args:
            device: the sender as named by the topic; it is in the roster.
            chunk: header and payload.
            now_s: the time.

        Raises:
            ShoalError: malformed, too large, forged, or refused; in the last case the device was told.
        """
        if self.state(device, parse(chunk)[0].transfer_id) is not UploadState.RECEIVING:
            return  # a copy of an upload that is being committed or was answered
        state = self._driver.state
        transfer = self._inbound.message(device, chunk, state, now_s)
        if transfer is None:
            return
        roster = self._membership.roster
        if transfer.kind is ChunkKind.DECLINE:
            self._driver.feed(self._verifier.decline(device, transfer, roster))
        elif transfer.kind is ChunkKind.REMINDER:
            if not self._retransmission.is_too_soon(device, now_s):
                reminder = self._verifier.reminder(device, transfer, roster)
                self._retransmission.on_reminder(reminder, state, now_s, self._inbound.upload_bytes(device, state))
        else:
            self._on_upload(device, transfer)

    def _on_upload(self, device: str, transfer: Transfer) -> None:
        """Validate a complete upload, and queue, acknowledge or refuse it."""
        ref = UploadRef(device, transfer.transfer_id)
        try:
            upload = self._verifier.upload(device, transfer, self._membership.roster)
        except RefusedUploadError as error:
            self._refuse(ref, error.header, str(error))
            raise
        queued = self._queue.of(device)
        pending = None if queued is None else queued.digest
        decision, reason = self._engine.validate(self._driver.state, upload.header, upload.digest, pending)
        if decision is Decision.STORE:
            self._queue.append(upload)
        elif decision is Decision.REFUSE:
            self._refuse(ref, upload.header, reason)
            raise UntrustedError(f"upload of {device} for round {upload.header.round}: {reason}")
        elif queued is None:
            self._answers.answer(ref, upload.header.round, UploadEvent.FOUND_STORED)
        # else: a copy of a queued upload, under another transfer id. The commit of the first copy is the answer.

    def _refuse(self, ref: UploadRef, header: Upload, reason: str) -> None:
        """Refuse an upload, and let the open round go on without waiting for its device."""
        self._answers.answer(ref, header.round, UploadEvent.REJECTED, reason)
        self._driver.feed(Declined(ref.device, header.nonce, DeclineReason.UPLOAD))

    def flush(self) -> None:
        """Start to commit the valid uploads, unless a commit is already under way."""
        self._queue.flush(self._on_committed)

    def _on_committed(self, committed: Committed) -> None:
        """Let the engine count durable uploads, then acknowledge them.

        A round that opens is announced before the acknowledgements of the round that closes are sent, because devices wait
        for the announcement only.
        """
        self._driver.on_committed([Stored(contribution, upload.digest) for upload, contribution in committed])
        for upload, _ in committed:
            self._answers.answer(upload.ref, upload.header.round, UploadEvent.COMMITTED)
        for upload in self._queue.valid:
            self._refuse_if_late(upload)
        self._driver.on_answered()
        self.flush()

    def _refuse_if_late(self, upload: VerifiedUpload) -> None:
        """Refuse a valid upload whose round has closed."""
        decision, reason = self._engine.validate(self._driver.state, upload.header, upload.digest)
        if decision is not Decision.STORE:
            self._queue.withdraw(upload)
            self._answers.answer(upload.ref, upload.header.round, UploadEvent.ROUND_CLOSED, reason)

    def tick(self, now_s: float) -> None:
        """Request missing chunks, and drop transfers that have taken too long."""
        self._retransmission.tick(self._driver.state, now_s)
        self._inbound.expire(now_s)

    def on_disconnect(self) -> None:
        """Forget the requests made so far: the broker may have lost them."""
        self._retransmission.on_disconnect()
