"""Uploads between their arrival and their acknowledgement: appended as they come, made durable many at a time, committed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aggregator.storage.fsync_worker import Syncer
    from aggregator.storage.store import Store
    from aggregator.strategies.base import Contribution
    from aggregator.uploads.validation import Opened

Landed = list[tuple["Opened", "Contribution"]]
"""Uploads that are durable, and what the store made of each, in the order of their arrival."""


class Landing:
    """The uploads of one run that are on their way to the disk, at most one a device.

    Args:
        store: keeps them.
        syncer: waits for the disk; what it hands back runs on the driver's own thread.
    """

    def __init__(self, store: Store, syncer: Syncer) -> None:
        self._store = store
        self._syncer = syncer
        self._appended: dict[str, Opened] = {}
        self._syncing: dict[str, Opened] = {}

    @property
    def busy(self) -> bool:
        """Whether any upload is on its way."""
        return bool(self._appended or self._syncing)

    def of(self, device: str) -> Opened | None:
        """Return the upload of ``device`` that is on its way."""
        return self._syncing.get(device) or self._appended.get(device)

    def append(self, opened: Opened) -> None:
        """Take an upload of a device of which none is on its way; it is durable some time after the next `flush`."""
        self._store.append(opened.upload, opened.body, opened.norm, opened.digest)
        # The store has the bytes: uploads that wait for the disk take no memory of their own.
        self._appended[opened.upload.device] = dataclasses.replace(opened, body=memoryview(b""))

    def flush(self, landed: Callable[[Landed], None]) -> None:
        """Begin to make durable what was appended, unless that is under way for what came before; then call ``landed``."""
        if self._syncing or not self._appended:
            return
        self._syncing, self._appended = self._appended, {}
        self._syncer.submit(self._store.prepare(), lambda: landed(self._commit()))

    def _commit(self) -> Landed:
        done = list(zip(self._syncing.values(), self._store.commit(), strict=True))
        self._syncing = {}
        return done

    def withdraw(self, objection: Callable[[Opened], str | None]) -> Iterator[tuple[Opened, str]]:
        """Take out again each upload there is an objection to, if its way to the disk has not begun; yield both."""
        for device, opened in tuple(self._appended.items()):
            reason = objection(opened)
            if reason is not None:
                del self._appended[device]
                self._store.withdraw(opened.digest)
                yield opened, reason
