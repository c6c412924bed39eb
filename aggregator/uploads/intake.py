"""Verification of complete uploads on the run's intake workers: all that costs time and needs no other upload.

A worker joins the chunks, verifies signature and digest, opens the seal, checks the plan's limits, and writes the vector to the
file of the open round. The driver's thread gets a small record back and decides.

A worker sees the engine's state as it was when the upload was complete. If the upload may not be stored by that state, nothing is
written: a flood of copies takes no disk. The driver's thread asks the engine once more, with the state of that time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aggregator.rounds.duplicates_and_limits import Decision
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from aggregator.rounds.engine import Engine
    from aggregator.rounds.state import EngineState
    from aggregator.storage.store import Store, WrittenUpload
    from aggregator.uploads.states import UploadRef
    from aggregator.uploads.validation import UploadVerifier
    from aggregator.workers import Workers
    from shoal.protocol.documents import Roster
    from shoal.protocol.messages import Upload
    from shoal.protocol.reassembly import ReceivedChunks


@dataclass(frozen=True, slots=True)
class OpenedUpload:
    """An authentic upload within the plan's limits, without its vector.

    Attributes:
        header: its header.
        ref: its identity.
        digest: the hash that its device signed; two uploads with one digest are the same.
        written: what the store appends; None if the state did not allow the upload, or the file of its round was closed.
    """

    header: Upload
    ref: UploadRef
    digest: bytes
    written: WrittenUpload | None


Result = OpenedUpload | ShoalError
"""An upload, or the error for which it is dropped or refused."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A complete upload, and what it is judged by.

    Attributes:
        ref: its identity, as its chunks claim it.
        chunks: the upload.
        roster: the newest roster.
        state: of the run.
        pending: digest of the device's upload that is valid and not durable yet, None without one.
    """

    ref: UploadRef
    chunks: ReceivedChunks
    roster: Roster
    state: EngineState
    pending: bytes | None


class Intake:
    """Hands uploads to the workers, and remembers which are still in their hands.

    Args:
        workers: of the run.
        verifier: opens and verifies uploads.
        engine: validates them against the open round.
        store: writes them.
    """

    def __init__(self, workers: Workers, verifier: UploadVerifier, engine: Engine, store: Store) -> None:
        self._workers = workers
        self._verifier = verifier
        self._engine = engine
        self._store = store
        self._unfinished: OrderedDict[int, None] = OrderedDict()
        self.newest = 0

    def is_done(self, number: int) -> bool:
        """Return whether the workers have finished all uploads up to the one with this ``number``."""
        return not self._unfinished or next(iter(self._unfinished)) > number

    def submit(self, arrival: Arrival, done: Callable[[Result], None]) -> None:
        """Have an upload verified and written, then ``done`` called on the driver's thread; may wait for room.

        The upload gets the number ``newest``.
        """
        self.newest = number = self.newest + 1
        self._unfinished[number] = None
        if arrival.state.plan is not None:
            self._store.open_updates(arrival.state.round)

        def finish(result: Result) -> None:
            del self._unfinished[number]
            done(result)

        size = arrival.chunks.header.size
        self._workers.submit(lambda: self._opened(arrival), finish, key=arrival.ref.device, size=size)

    def _opened(self, arrival: Arrival) -> Result:
        """Return the upload of an arrival, written if it may be stored; on a worker's thread."""
        try:
            transfer = arrival.chunks.join()
            upload = self._verifier.upload(arrival.ref.device, transfer, arrival.roster)
        except ShoalError as error:
            return error
        header, digest = upload.header, upload.digest
        decision, _ = self._engine.validate(arrival.state, header, digest, arrival.pending)
        written = None
        if decision is Decision.STORE:
            written = self._store.write(header, upload.body, upload.norm, digest)
        return OpenedUpload(header, arrival.ref, digest, written)
