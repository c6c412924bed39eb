"""Verification of complete uploads on the run's intake workers: all that costs time and needs no other upload.

A worker joins the chunks, verifies signature and digest, opens the seal, checks the plan's limits, and writes the vector to the
file of the open round. The driver's thread gets a small record back and decides.

A worker sees the engine's state as it was when the upload was complete. If the upload may not be stored by that state, nothing is
written: a flood of copies takes no disk. The driver's thread asks the engine once more, with the state of that time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.storage.upload import OpenedUpload
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from aggregator.rounds.engine import Engine
    from aggregator.rounds.state import EngineState
    from aggregator.storage.store import Store
    from aggregator.uploads.validation import UploadVerifier
    from aggregator.workers import Workers
    from shoal.protocol.documents import Roster
    from shoal.protocol.reassembly import ReceivedChunks


Result = OpenedUpload | ShoalError
"""An upload, or the error for which it is dropped or refused."""


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

    def submit(
        self,
        chunks: ReceivedChunks,
        roster: Roster,
        state: EngineState,
        pending: bytes | None,
        done: Callable[[Result], None],
    ) -> None:
        """Have an upload verified and written, then ``done`` called on the driver's thread; may wait for room.

        The upload gets the number ``newest``.

        Args:
            chunks: the upload; their source is its device.
            roster: the newest roster.
            state: of the run.
            pending: digest of the device's upload that is valid and not durable yet, None without one.
            done: takes the upload; without ``start`` if the state does not allow it, or the file of its round is closed.
        """
        self.newest = number = self.newest + 1
        self._unfinished[number] = None
        if state.plan is not None:
            self._store.open_updates(state.round)

        def opened() -> Result:
            try:
                upload = self._verifier.upload(chunks.source, chunks.join(), roster)
            except ShoalError as error:
                return error
            decision, _ = self._engine.validate(state, upload.header, upload.digest, pending)
            return self._store.write(upload) if decision is Decision.STORE else upload

        def finish(result: Result) -> None:
            del self._unfinished[number]
            done(result)

        self._workers.submit(opened, finish, key=chunks.source, size=chunks.header.size)
