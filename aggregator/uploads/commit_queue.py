"""The queue of uploads for the disk: appended as they arrive, committed many at a time (group commit)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aggregator.uploads.states import UploadEvent

if TYPE_CHECKING:
    from aggregator.storage.store import Store
    from aggregator.storage.upload import OpenedUpload
    from aggregator.strategies.base import ClientUpdate
    from aggregator.uploads.states import UploadTable
    from aggregator.workers import Workers


class CommitQueue:
    """The uploads of one run that are VALID or COMMITTING, at most one of each device.

    Args:
        store: writes them.
        disk: the worker that waits for the disk.
        table: the states of the uploads.
    """

    def __init__(self, store: Store, disk: Workers, table: UploadTable) -> None:
        self._store = store
        self._disk = disk
        self._table = table
        self._valid: dict[str, OpenedUpload] = {}
        self._committing: dict[str, OpenedUpload] = {}

    @property
    def busy(self) -> bool:
        """Whether the queue holds any upload."""
        return bool(self._valid or self._committing)

    @property
    def valid(self) -> tuple[OpenedUpload, ...]:
        """The uploads whose commit has not started, in order of arrival."""
        return tuple(self._valid.values())

    def of(self, device: str) -> OpenedUpload | None:
        """Return the queued upload of ``device``, None if absent."""
        return self._committing.get(device) or self._valid.get(device)

    def append(self, upload: OpenedUpload) -> None:
        """Append a valid upload, which is written, to the open batch; its device must have no other upload in the queue."""
        self._store.append(upload)
        self._table.move(upload.ref, UploadEvent.VALIDATED)
        self._valid[upload.ref.device] = upload

    def flush(self, committed: Callable[[list[OpenedUpload], list[ClientUpdate]], None]) -> None:
        """Start an fsync of the open batch unless one is already running.

        Args:
            committed: called when the batch is durable, with its uploads and the store's update of each, in order of arrival.
        """
        if self._committing or not self._valid:
            return
        for upload in self._valid.values():
            self._table.move(upload.ref, UploadEvent.COMMIT_STARTED)
        self._committing, self._valid = self._valid, {}
        self._disk.submit(self._store.prepare(), lambda _: committed(*self._commit()))

    def _commit(self) -> tuple[list[OpenedUpload], list[ClientUpdate]]:
        updates, uploads = self._store.commit(), list(self._committing.values())
        self._committing = {}
        return uploads, updates

    def withdraw(self, upload: OpenedUpload) -> None:
        """Remove a valid upload from the open batch."""
        del self._valid[upload.ref.device]
        self._store.withdraw(upload.digest)
