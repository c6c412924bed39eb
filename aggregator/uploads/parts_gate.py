"""Uploads whose header is here, until all workers have reported their parts; those in one piece pass at once."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aggregator.storage.upload import OpenedUpload
    from shoal.protocol.jobs import PartReport, StoredPart


class PartsGate:
    """The uploads of the open round that wait for reports, at most one of each device, and the reports that came first."""

    def __init__(self) -> None:
        self._held: dict[str, OpenedUpload] = {}
        self._reported: dict[tuple[str, int], StoredPart] = {}
        self._round = 0

    @property
    def held(self) -> tuple[OpenedUpload, ...]:
        """The uploads that wait."""
        return tuple(self._held.values())

    def of(self, device: str) -> OpenedUpload | None:
        """Return the upload of ``device`` that waits; None if absent."""
        return self._held.get(device)

    def hold(self, upload: OpenedUpload) -> OpenedUpload | None:
        """Take an upload; return it with its norm if all its parts are reported already, and unchanged if it has none."""
        if not upload.header.parts:
            return upload
        self._held[upload.ref.device] = upload
        return self._complete(upload.ref.device)

    def report(self, report: PartReport) -> list[OpenedUpload]:
        """Take a worker's report; return the uploads that it completes, each with its norm."""
        if report.round > self._round:
            self._round, self._reported = report.round, {}
        elif report.round < self._round:
            return []
        for part in report.parts:
            self._reported[(part.device, report.worker)] = part
        found = (self._complete(part.device) for part in report.parts)
        return [upload for upload in found if upload is not None]

    def withdraw(self, upload: OpenedUpload) -> None:
        """Forget an upload whose round has closed."""
        self._held.pop(upload.ref.device, None)

    def lacks(self, workers: int) -> dict[int, int]:
        """Return worker -> number of uploads that wait for its report."""
        found: dict[int, int] = {}
        for device, upload in self._held.items():
            for worker in range(workers):
                part = self._reported.get((device, worker))
                if part is None or part.digest != upload.header.parts[worker]:
                    found[worker] = found.get(worker, 0) + 1
        return found

    def _complete(self, device: str) -> OpenedUpload | None:
        upload = self._held.get(device)
        if upload is None:
            return None
        parts = [self._reported.get((device, worker)) for worker in range(len(upload.header.parts))]
        squares = []
        for part, digest in zip(parts, upload.header.parts, strict=True):
            if part is None or (part.digest, part.phase) != (digest, upload.header.phase):
                return None
            squares.append(part.squared_norm)
        del self._held[device]
        return dataclasses.replace(upload, norm=math.sqrt(math.fsum(squares)))
