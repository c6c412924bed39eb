"""The facade of the package: takes chunks of devices' uploads, stores them, and answers.

See the package's docstring for the states of an upload and the rules.

A `PartsGate` holds the uploads of a run with workers until these have reported all their parts.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Final, NoReturn, Protocol

from aggregator.inbound import Inbound
from aggregator.membership import AggregatorMembership
from aggregator.publisher import Publisher
from aggregator.rounds.duplicates_and_limits import Decision, other_head
from aggregator.rounds.engine import Engine
from aggregator.rounds.screening import norm_error
from aggregator.rounds.state import Declined, EngineEvent, EngineState
from aggregator.shards.coordinator import PartsGate
from aggregator.storage.store import NOTHING, OpenedUpload, Store, UploadRef
from aggregator.strategies.base import ClientUpdate
from aggregator.uploads.retransmission import Answers
from aggregator.uploads.states import UploadEvent, UploadState, UploadTable
from aggregator.uploads.validation import RefusedUploadError, UploadVerifier
from aggregator.workers import RunWorkers
from shoal.errors import ShoalError, UntrustedError
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.documents import RunPlan
from shoal.protocol.jobs import PartReport
from shoal.protocol.messages import DeclineReason, Upload
from shoal.protocol.precision.lengths import norm_room
from shoal.protocol.reassembly import DigestError, NoRoomError, ReceivedChunks

COMMITTED_AT_ONCE: Final = 64
"""Valid uploads that are committed even while the workers have more: a commit costs the same for one as for many."""


class EngineDriver(Protocol):
    """The driver of the run's engine (`RunService`), as the uploads see it."""

    @property
    def state(self) -> EngineState:
        """The engine's state."""

    @property
    def computing(self) -> bool:
        """Whether a round is being closed on another thread; until then no upload is committed."""

    def feed(self, event: EngineEvent) -> None:
        """Let the engine handle an event, now or after the uploads that arrived before it."""

    def on_committed(self, updates: Sequence[ClientUpdate]) -> None:
        """Let the engine handle durable uploads now."""

    def on_progress(self) -> None:
        """Let the engine handle the events that no upload holds back any more."""

    def on_refused(self, device: str, error: ShoalError) -> None:
        """Report that an upload of ``device`` is not used, and why."""


class Uploads:
    """The uploads of one run.

    Args:
        run: the owner's plan.
        membership: this aggregator's keys and the roster.
        engine: validates uploads against the open round.
        driver: holds the engine's state and takes its events.
        inbound: reassembles the chunks.
        store: makes uploads durable.
        workers: wait for the disk, and verify uploads.
        publisher: sends answers and requests.

    Attributes:
        newest: number of the newest complete upload, which `holds_back` takes.
        answers: to devices.
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
        workers: RunWorkers,
        publisher: Publisher,
    ) -> None:
        self._membership = membership
        self._engine = engine
        self._driver = driver
        self._inbound = inbound
        self._table = UploadTable()
        self._verifier = UploadVerifier(membership.identity, run)
        self._store = store
        self._intake = workers.intake
        self._unfinished: OrderedDict[int, None] = OrderedDict()
        self.newest = 0
        self._disk = workers.disk
        # Those in VALID and in COMMITTING, in order of arrival: at most one of each device.
        self._valid: dict[str, OpenedUpload] = {}
        self._committing: dict[str, OpenedUpload] = {}
        self._run = run
        self._gate = PartsGate()
        self._gather_until = 0
        self.answers = Answers(inbound.chunks, publisher, membership, run, self._table)

    @property
    def committing(self) -> bool:
        """Whether any upload is valid and not yet durable."""
        return bool(self._valid or self._committing)

    def holds_back(self, number: int) -> bool:
        """Return whether the engine has not seen an upload yet that was complete when the newest had this ``number``."""
        return self.committing or not self._is_done(number)

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
            ShoalError: malformed or too large; or a reminder or decline that is forged. An upload that is forged or refused
                is reported to `EngineDriver.on_refused`.
        """
        parsed = parse(chunk)
        if self.state(device, parsed[0].transfer_id) is not UploadState.RECEIVING:
            return  # a copy of an upload that is being verified or committed, or was answered
        state = self._driver.state
        chunks = self._inbound.message(device, chunk, state, now_s, parsed)
        if chunks is None:
            return
        roster = self._membership.roster
        kind = chunks.header.kind
        if kind is ChunkKind.UPLOAD:
            self._on_upload(device, chunks)
        elif kind is ChunkKind.DECLINE:
            self._driver.feed(self._verifier.decline(device, self._inbound.chunks.join(chunks), roster))
        elif not self.answers.is_too_soon(device, now_s):
            reminder = self._verifier.reminder(device, self._inbound.chunks.join(chunks), roster)
            self.answers.on_reminder(reminder, state, now_s, self._inbound.upload_bytes(device, state))

    def _on_upload(self, device: str, chunks: ReceivedChunks) -> None:
        """Have a complete upload verified and written by a worker; may wait for room. Its number is ``newest``.

        A worker joins the chunks, verifies signature and digest, opens the seal, checks the plan's limits, and writes the body
        to the file of the open round. If the upload may not be stored by the state that the engine has now, nothing is
        written: a flood of copies takes no disk. `_decide` asks the engine once more, with the state of that time.
        """
        ref, state, roster = UploadRef(device, chunks.header.transfer_id), self._driver.state, self._membership.roster
        queued = self._waiting(device)
        pending = None if queued is None else queued.digest
        self._table.move(ref, UploadEvent.COMPLETE)
        self.newest = number = self.newest + 1
        self._unfinished[number] = None
        if state.plan is not None:
            self._store.open_updates(state.round)

        def opened() -> OpenedUpload | ShoalError:
            try:
                upload = self._verifier.upload(device, chunks.join(), roster)
            except ShoalError as error:
                return error
            decision, _ = self._engine.validate(state, upload.header, upload.digest, pending)
            return (
                self._store.write(upload) if decision is Decision.STORE else dataclasses.replace(upload, body=NOTHING)
            )

        self._intake.submit(opened, partial(self._on_opened, ref, number), key=device, size=chunks.header.size)

    def _is_done(self, number: int) -> bool:
        """Return whether the workers have finished all uploads up to the one with this ``number``."""
        return not self._unfinished or next(iter(self._unfinished)) > number

    def _on_opened(self, ref: UploadRef, number: int, found: OpenedUpload | ShoalError) -> None:
        """Queue, acknowledge or refuse an upload that a worker has opened, and report an error."""
        del self._unfinished[number]
        try:
            self._decide(ref, found)
        except ShoalError as error:
            self._driver.on_refused(ref.device, error)
        self._driver.on_progress()

    def _decide(self, ref: UploadRef, found: OpenedUpload | ShoalError) -> None:
        if isinstance(found, RefusedUploadError):
            self._refuse(ref, found.header, str(found))
            raise found
        if isinstance(found, ShoalError):
            self._table.move(ref, UploadEvent.DROPPED)
            if isinstance(found, DigestError | NoRoomError):
                self._inbound.chunks.count_refused("digest" if isinstance(found, DigestError) else "no-room")
            raise found
        queued = self._waiting(ref.device)
        pending = None if queued is None else queued.digest
        decision, reason = self._engine.validate(self._driver.state, found.header, found.digest, pending)
        if decision is Decision.STORE and found.start is not None:
            whole = self._gate.hold(found)
            if whole is not None:
                self._enqueue(whole)
        elif decision is Decision.REFUSE:
            self._refuse_opened(found, reason)
        elif decision is Decision.DUPLICATE and queued is None:
            self.answers.answer(ref, found.header.round, UploadEvent.FOUND_STORED)
        else:
            # A copy of a queued upload, under another transfer id: the commit of the first copy is the answer. Or an upload that
            # only the newer state allows: it is not written, and the device offers it again.
            self._table.move(ref, UploadEvent.DROPPED)

    def _waiting(self, device: str) -> OpenedUpload | None:
        """Return the valid upload of a device that is not durable yet, or waits for its parts; None without one."""
        return self._committing.get(device) or self._valid.get(device) or self._gate.held.get(device)

    def _enqueue(self, upload: OpenedUpload) -> None:
        """Queue an upload that is here as a whole, unless it is too long, which of parts only their reports say.

        Raises:
            UntrustedError: it is refused.
        """
        reason = norm_error(upload.norm, self._run.recipe.norm_limit * norm_room(self._run.recipe.precision_up))
        if reason:
            self._refuse_opened(upload, reason)
        if not self._valid:
            self._gather_until = self.newest
        self._table.move(upload.ref, UploadEvent.VALIDATED)
        self._valid[upload.ref.device] = upload

    @property
    def lacks(self) -> dict[int, int]:
        """Worker -> number of uploads that wait for its report."""
        return self._gate.lacks(len(self._run.workers))

    def on_report(self, report: PartReport) -> None:
        """Take a worker's report of parts that it has made durable."""
        for upload in self._gate.report(report):
            try:
                decision, reason = self._engine.validate(self._driver.state, upload.header, upload.digest)
                if decision is not Decision.STORE:
                    self._refuse_opened(upload, reason)
                self._enqueue(upload)
            except ShoalError as error:
                self._driver.on_refused(upload.ref.device, error)

    def _refuse_opened(self, upload: OpenedUpload, reason: str) -> NoReturn:
        self._refuse(upload.ref, upload.header, reason)
        raise UntrustedError(f"upload of {upload.ref.device} for round {upload.header.round}: {reason}")

    def _refuse(self, ref: UploadRef, header: Upload | None, reason: str) -> None:
        """Refuse an upload, and let the open round go on without waiting for its device if it is the answer to that round."""
        state = self._driver.state
        nonce, run_id = self._engine.nonce(state.round), self._run.run_id
        self.answers.answer(ref, state.round if header is None else header.round, UploadEvent.REJECTED, reason)
        # One that is late says nothing about its device. A header that can't be read has no round, and no honest device signs it.
        if header is None or nonce == header.nonce or (run_id, state.round) == (header.run_id, header.round):
            other = b"" if header is None else other_head(state, header)
            self._driver.feed(Declined(ref.device, nonce, DeclineReason.UPLOAD, other))

    def flush(self) -> None:
        """Start to commit the valid uploads, unless a commit or the close of a round is under way.

        Few of them wait for those that workers have in hand, but not for any that arrive later.
        """
        gathered = len(self._valid) >= COMMITTED_AT_ONCE or self._is_done(self._gather_until)
        if not gathered or self._driver.computing or self._committing or not self._valid:
            return
        for upload in self._valid.values():
            self._table.move(upload.ref, UploadEvent.COMMIT_STARTED)
        self._committing, self._valid = self._valid, {}
        self._disk.submit(self._store.syncer(), lambda _: self._on_synced())

    def _on_synced(self) -> None:
        """Commit the batch whose bodies are durable, let the engine count its uploads, then acknowledge them.

        A round that opens at once is announced before the acknowledgements of the round that closes are sent, because devices
        wait for the announcement only.
        """
        uploads = tuple(self._committing.values())
        updates = self._store.commit(uploads)
        self._committing = {}
        self._driver.on_committed(updates)
        for upload in uploads:
            self.answers.answer(upload.ref, upload.header.round, UploadEvent.COMMITTED)
        self.review()

    def review(self) -> None:
        """Refuse the valid uploads whose round has closed, then go on with events and uploads; do nothing during a close."""
        if self._driver.computing:
            return
        waiting = [(upload, self._valid, UploadEvent.ROUND_CLOSED) for upload in self._valid.values()]
        waiting += [(upload, self._gate.held, UploadEvent.REJECTED) for upload in self._gate.held.values()]
        for upload, held, event in waiting:
            decision, reason = self._engine.validate(self._driver.state, upload.header, upload.digest)
            if decision is not Decision.STORE:
                del held[upload.ref.device]
                self.answers.answer(upload.ref, upload.header.round, event, reason)
        self._driver.on_progress()
        self.flush()

    def tick(self, now_s: float) -> None:
        """Request missing chunks, and drop transfers that have taken too long."""
        self.answers.tick(self._driver.state, now_s)
        self._inbound.expire(now_s)

    def on_disconnect(self) -> None:
        """Forget the requests made so far: the broker may have lost them."""
        self.answers.on_disconnect()
