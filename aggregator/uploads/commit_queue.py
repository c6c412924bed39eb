"""The queue of uploads for the disk: appended as they arrive, committed many at a time (group commit)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from aggregator.uploads.states import UploadEvent

if TYPE_CHECKING:
    from aggregator.storage.fsync_worker import FsyncWorker
    from aggregator.storage.store import Store
    from aggregator.strategies.base import ClientUpdate
    from aggregator.uploads.states import UploadTable
    from aggregator.uploads.validation import VerifiedUpload

Committed = list[tuple["VerifiedUpload", "ClientUpdate"]]
"""Durable uploads with the store's contribution of each, in order of arrival."""


class CommitQueue:
    """The uploads of one run that are VALID or COMMITTING, at most one of each device.

    Args:
        store: writes them.
        syncer: runs the fsync; it calls back on the driver's own thread.
        table: the states of the uploads.
    """

    def __init__(self, store: Store, syncer: FsyncWorker, table: UploadTable) -> None:
        self._store = store
        self._syncer = syncer
        self._table = table
        self._valid: dict[str, VerifiedUpload] = {}
        self._committing: dict[str, VerifiedUpload] = {}

    @property
    def busy(self) -> bool:
        """Whether the queue holds any upload."""
        return bool(self._valid or self._committing)

    @property
    def valid(self) -> tuple[VerifiedUpload, ...]:
        """The uploads whose commit has not started, in order of arrival."""
        return tuple(self._valid.values())

    def of(self, device: str) -> VerifiedUpload | None:
        """Return the queued upload of ``device``, None if there is none."""
        return self._committing.get(device) or self._valid.get(device)

    def append(self, upload: VerifiedUpload) -> None:
        """Append a valid upload to the open batch; its device must have no other upload in the queue."""
        self._store.append(upload.header, upload.body, upload.norm, upload.digest)
        self._table.move(upload.ref, UploadEvent.VALIDATED)
        # The store has the bytes, so the queue needs no memory for them.
        self._valid[upload.ref.device] = dataclasses.replace(upload, body=memoryview(b""))

    def flush(self, committed: Callable[[Committed], None]) -> None:
        """Start an fsync of the open batch unless one is already running; call ``committed`` when the batch is durable."""
        if self._committing or not self._valid:
            return
        for upload in self._valid.values():
            self._table.move(upload.ref, UploadEvent.COMMIT_STARTED)
        self._committing, self._valid = self._valid, {}
        self._syncer.submit(self._store.prepare(), lambda: committed(self._commit()))

    def _commit(self) -> Committed:
        done = list(zip(self._committing.values(), self._store.commit(), strict=True))
        self._committing = {}
        return done

    def withdraw(self, upload: VerifiedUpload) -> None:
        """Remove a valid upload from the open batch."""
        del self._valid[upload.ref.device]
        self._store.withdraw(upload.digest)
