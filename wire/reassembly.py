"""Put chunks of many sources together again, within fixed bounds."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NoReturn

from wire import limits
from wire.errors import WireError
from wire.frame import ChunkHeader, ChunkKind, Fingerprint, parse

MAX_MISSING_LISTED: Final = 1024
"""A stalled transfer names at most this many missing chunks; the rest follows with the next report."""

LAZY_BYTES: Final = 4 << 20
"""From this size on, a transfer costs memory only where a chunk has landed: one chunk may announce a gigabyte.

Below it, memory comes from the heap, which is 15 times as fast: a fresh mapping pays a page fault for every 4 KiB.
"""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A complete payload whose digest is its transfer id; ``signed`` is `Fingerprint`'s."""

    source: str
    kind: ChunkKind
    round: int
    transfer_id: bytes
    payload: memoryview = field(repr=False)
    signed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Stalled:
    """A transfer that waits for chunks; ``missing`` names the first MAX_MISSING_LISTED of them, ascending."""

    source: str
    transfer_id: bytes
    kind: ChunkKind
    round: int
    missing: tuple[int, ...]


_Key = tuple[ChunkKind, int, bytes]


@dataclass(slots=True)
class _Pending:
    """One transfer in reassembly."""

    header: ChunkHeader
    started_s: float
    touched_s: float
    reported_s: float
    buffer: memoryview
    have: bytearray
    left: int

    def missing(self) -> tuple[int, ...]:
        found: list[int] = []
        at = self.have.find(0)
        while at >= 0 and len(found) < MAX_MISSING_LISTED:
            found.append(at)
            at = self.have.find(0, at + 1)
        return tuple(found)


def _buffer(size: int) -> memoryview:
    """Return ``size`` writable bytes: heap memory that is used again, or, when large, pages that exist once written."""
    if size < LAZY_BYTES:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Reassembler:
    """Puts chunks of many sources together within fixed bounds; one owner, not thread-safe, no clock of its own.

    A transfer is known by (source, kind, round, id). A completed transfer is forgotten at once: a chunk that comes again
    later begins it anew, so the owner must recognise what it already has and ``drop`` it.

    No source can starve another: when all transfers together would exceed ``max_pending_bytes``, the oldest transfer of
    the source that holds the most gives way, unless that source is the one asking, which is then refused.

    Args:
        max_transfer_bytes: largest payload accepted.
        max_pending_bytes: bytes of all unfinished payloads together, counted by their announced size.
        max_per_source: unfinished transfers a source may have; its oldest gives way to a new one.
        deadline_s: ``expire`` drops a transfer this long after its first chunk.
    """

    def __init__(
        self,
        max_transfer_bytes: int = limits.MAX_TRANSFER_BYTES,
        max_pending_bytes: int = limits.MAX_PENDING_BYTES,
        max_per_source: int = limits.MAX_TRANSFERS_PER_SOURCE,
        deadline_s: float = limits.REASSEMBLY_DEADLINE_S,
    ) -> None:
        self._max_transfer_bytes = max_transfer_bytes
        self._max_pending_bytes = max_pending_bytes
        self._max_per_source = max_per_source
        self._deadline_s = deadline_s
        self._sources: dict[str, dict[_Key, _Pending]] = {}
        self._held: Counter[str] = Counter()
        self._pending_bytes = 0
        self._fed_s = -math.inf
        self._refused: Counter[str] = Counter()

    @property
    def pending_bytes(self) -> int:
        """Announced bytes of all unfinished transfers."""
        return self._pending_bytes

    @property
    def refused(self) -> Mapping[str, int]:
        """How often what was refused or given up.

        Keys: malformed, oversized, conflict, no-room and digest raise; duplicate, displaced and expired are silent.
        """
        return MappingProxyType(self._refused)

    def __len__(self) -> int:
        return sum(len(transfers) for transfers in self._sources.values())

    def add(self, source: str, chunk: bytes | memoryview, now_s: float) -> Transfer | None:
        """Take one chunk of ``source``; return the transfer when this chunk completes it.

        Args:
            source: who sent it, as the broker vouches for it (the device in the topic).
            chunk: header and payload. The payload of a single-chunk transfer is a view of it.
            now_s: seconds of any steady clock, the same one in every call.

        Raises:
            WireError: the chunk is malformed, too large, contradicts its transfer, or the digest is wrong.
        """
        try:
            header, body = parse(chunk)
        except WireError:
            self._refused["malformed"] += 1
            raise
        if header.size > self._max_transfer_bytes:
            self._refuse("oversized", f"a transfer of {header.size} bytes is above {self._max_transfer_bytes}")
        if header.total == 1:
            return self._complete(source, header, body)
        key = (header.kind, header.round, header.transfer_id)
        pending = self._sources.get(source, {}).get(key)
        if pending is None:
            pending = self._begin(source, key, header, now_s)
        elif (pending.header.size, pending.header.chunk_bytes) != (header.size, header.chunk_bytes):
            self._refuse("conflict", f"chunk {header.index} contradicts the transfer that it belongs to")
        if pending.have[header.index]:
            self._refused["duplicate"] += 1
            return None
        pending.touched_s = self._fed_s = now_s
        pending.buffer[header.offset : header.offset + len(body)] = body
        pending.have[header.index] = 1
        pending.left -= 1
        if pending.left:
            return None
        self._forget(source, key)
        return self._complete(source, header, pending.buffer.toreadonly())

    def stalled(self, now_s: float, quiet_s: float = limits.REASSEMBLY_QUIET_S) -> list[Stalled]:
        """Return the transfers without a new chunk for a while, each at most once in that time.

        That is ``quiet_s`` seconds; as long as others still get new chunks, `REASSEMBLY_BUSY_S`.
        """
        busy = now_s - self._fed_s < quiet_s
        patience_s = max(quiet_s, limits.REASSEMBLY_BUSY_S) if busy else quiet_s
        found = []
        for source, transfers in self._sources.items():
            for (kind, round_, name), pending in transfers.items():
                if now_s - max(pending.touched_s, pending.reported_s) >= patience_s:
                    pending.reported_s = now_s
                    found.append(Stalled(source, name, kind, round_, pending.missing()))
        return found

    def missing(
        self, source: str, round_: int, transfer_id: bytes, chunk_bytes: int, now_s: float
    ) -> tuple[int, ...] | None:
        """Return the first MAX_MISSING_LISTED chunks that an upload lacks, None where nothing of it came.

        `stalled` counts it as reported. What came in chunks of another length is dropped: the rest will not fit it.
        """
        key = (ChunkKind.UPLOAD, round_, transfer_id)
        pending = self._sources.get(source, {}).get(key)
        if pending is None:
            return None
        if pending.header.chunk_bytes != chunk_bytes:
            self._forget(source, key)
            return None
        pending.reported_s = now_s
        return pending.missing()

    def expire(self, now_s: float) -> list[Stalled]:
        """Drop and return the transfers that began ``deadline_s`` seconds ago or earlier."""
        gone = []
        for source, transfers in list(self._sources.items()):
            for key, pending in list(transfers.items()):
                if now_s - pending.started_s >= self._deadline_s:
                    self._forget(source, key)
                    self._refused["expired"] += 1
                    gone.append(Stalled(source, key[2], key[0], key[1], pending.missing()))
        return gone

    def drop(self, source: str, transfer_id: bytes | None = None) -> int:
        """Forget the unfinished transfers of ``source``, or only those named; return how many there were."""
        keys = [key for key in self._sources.get(source, {}) if transfer_id in (None, key[2])]
        for key in keys:
            self._forget(source, key)
        return len(keys)

    def _begin(self, source: str, key: _Key, header: ChunkHeader, now_s: float) -> _Pending:
        if len(self._sources.get(source, {})) >= self._max_per_source:
            self._displace(source)
        if header.size > self._max_pending_bytes:
            self._refuse("no-room", f"a transfer of {header.size} bytes is above all room there is")
        while self._pending_bytes + header.size > self._max_pending_bytes:
            heaviest = max(self._held, key=self._held.__getitem__)
            if self._held[heaviest] <= self._held[source] + header.size and heaviest != source:
                self._refuse("no-room", f"no room for {header.size} more bytes of {source!r}")
            self._displace(heaviest)
        try:
            buffer = _buffer(header.size)
        except (OSError, MemoryError):
            self._refuse("no-room", f"the system has no {header.size} bytes of memory left")
        pending = _Pending(header, now_s, now_s, now_s, buffer, bytearray(header.total), header.total)
        self._sources.setdefault(source, {})[key] = pending
        self._held[source] += header.size
        self._pending_bytes += header.size
        return pending

    def _displace(self, source: str) -> None:
        """Give up the oldest transfer of ``source``: a dict keeps the order in which they began."""
        self._forget(source, next(iter(self._sources[source])))
        self._refused["displaced"] += 1

    def _forget(self, source: str, key: _Key) -> None:
        size = self._sources[source].pop(key).header.size
        self._pending_bytes -= size
        self._held[source] -= size
        if not self._sources[source]:
            del self._sources[source], self._held[source]

    def _complete(self, source: str, header: ChunkHeader, payload: memoryview) -> Transfer:
        found = Fingerprint.of(payload)
        if found.transfer_id != header.transfer_id:
            self._refuse("digest", "the payload is not what its transfer id promises")
        return Transfer(source, header.kind, header.round, found.transfer_id, payload, found.signed)

    def _refuse(self, reason: str, message: str) -> NoReturn:
        self._refused[reason] += 1
        raise WireError(message)
