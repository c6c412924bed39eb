"""Reassembly of transfers from the chunks of many sources, within a memory budget for each source.

Example: the aggregator feeds `Reassembler.add` with each chunk of each device's topic. The call with the last missing chunk
returns the `Transfer`; `stalled` names the transfers whose chunks it should request again.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NoReturn, Protocol

from shoal import limits
from shoal.errors import LaterKindError, WireError, text_of
from shoal.protocol.chunking import (
    HEADER_BYTES,
    MIN_CHUNK_BYTES,
    ChunkHeader,
    ChunkKind,
    Fingerprint,
    chunk_count,
    parse,
)

MAX_MISSING_LISTED: Final = 1024
"""Most missing chunks named of a stalled transfer; later reports name the rest."""

LAZY_BYTES: Final = 4 << 20
"""From this size on, chunks are joined in an anonymous mapping, and each is released once it is copied there.

Smaller payloads are joined on the heap, which is 15 times as fast: a fresh mapping costs a page fault for every 4 KiB.
"""

CHUNK_OVERHEAD_BYTES: Final = 192
"""Memory of a stored chunk besides its bytes: the object's header and its entry in a dictionary."""

TRANSFER_OVERHEAD_BYTES: Final = 1024
"""Memory of an unfinished transfer besides its chunks: header, key and dictionaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A complete payload whose digest was checked against its transfer id; ``signed`` as in `Fingerprint`."""

    source: str
    kind: ChunkKind
    round: int
    transfer_id: bytes
    payload: memoryview = field(repr=False)
    signed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReceivedChunks:
    """All chunks of a transfer; its digest is not checked yet.

    Any thread may call `join`, once: it releases the chunks.

    Attributes:
        source: as in `Reassembler.add`.
        header: of one of the chunks.
        bodies: the payload in pieces, in order.
    """

    source: str
    header: ChunkHeader
    bodies: list[memoryview] = field(repr=False)

    def join(self) -> Transfer:
        """Return the transfer.

        Raises:
            DigestError: the payload is not what its transfer id promises.
            NoRoomError: the system has no memory for it.
        """
        payload = joined(self._released(), self.header.size)
        found = Fingerprint.of(payload)
        if found.transfer_id != self.header.transfer_id:
            raise DigestError("the payload is not what its transfer id promises")
        return Transfer(
            source=self.source,
            kind=self.header.kind,
            round=self.header.round,
            transfer_id=found.transfer_id,
            payload=payload,
            signed=found.signed,
        )

    def _released(self) -> Iterator[memoryview]:
        self.bodies.reverse()
        while self.bodies:
            yield self.bodies.pop()


def joined(bodies: Iterable[memoryview], size: int) -> memoryview:
    """Return ``size`` bytes in one buffer; a body is not referred to any more once it is copied.

    Raises:
        NoRoomError: the system has no memory for them.
    """
    try:
        if size < LAZY_BYTES:
            whole = tuple(bodies)
            # A single chunk needs no buffer: its payload is used in place.
            return whole[0] if len(whole) == 1 else memoryview(b"".join(whole))
        return _mapped(bodies, size)
    except MemoryError as error:
        raise NoRoomError(f"the system has no {size} bytes of memory left") from error


def _mapped(bodies: Iterable[memoryview], size: int) -> memoryview:
    try:
        whole = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError from error
    at = 0
    for body in bodies:
        whole[at : at + len(body)] = body
        at += len(body)
    return whole.toreadonly()


@dataclass(frozen=True, slots=True)
class Stalled:
    """A transfer with missing chunks; ``missing`` holds the first MAX_MISSING_LISTED indices, ascending."""

    source: str
    transfer_id: bytes
    kind: ChunkKind
    round: int
    missing: tuple[int, ...]


class TooLargeError(WireError):
    """A transfer is larger than its source may send, or of a kind that is not expected there."""


class DigestError(WireError):
    """A transfer whose bytes are not those that its id promises."""


class NoRoomError(WireError):
    """Neither memory nor the spool has room for a transfer."""


_Key = tuple[ChunkKind, int, bytes, int, int]
"""Kind, round, transfer id, size and chunk length, which all chunks of one transfer share."""


class Spool(Protocol):
    """Storage of chunks outside memory, such as a file."""

    def put(self, data: bytes) -> int:
        """Store ``data`` and return its position."""

    def take(self, at: int, size: int) -> bytes:
        """Return ``size`` bytes that `put` stored at ``at``, and free their space."""

    def free(self, at: int, size: int) -> None:
        """Free the space of ``size`` bytes that `put` stored at ``at``."""


@dataclass(frozen=True, slots=True)
class _Spooled:
    """A chunk in the spool."""

    at: int
    size: int


@dataclass(slots=True)
class _Pending:
    """A transfer in reassembly: the chunks received, by index, each with its header, in memory or in the spool."""

    total: int
    started_s: float
    touched_s: float
    reported_s: float
    held_bytes: int = TRANSFER_OVERHEAD_BYTES
    chunks: dict[int, bytes | _Spooled] = field(default_factory=dict)

    def missing(self) -> tuple[int, ...]:
        found: list[int] = []
        for index in range(self.total):
            if index not in self.chunks:
                found.append(index)
                if len(found) == MAX_MISSING_LISTED:
                    break
        return tuple(found)

    def take(self, size: int, spool: Spool | None) -> list[memoryview]:
        """Return the payload in pieces, in order, and remove the chunks.

        Chunks in the spool are joined here, one by one, so that the payload is in memory only once.
        """
        bodies = (self._body(index, spool) for index in range(self.total))
        if any(isinstance(chunk, _Spooled) for chunk in self.chunks.values()):
            return [joined(bodies, size)]
        return list(bodies)

    def _body(self, index: int, spool: Spool | None) -> memoryview:
        """Remove a chunk and return its payload."""
        chunk = self.chunks[index]
        if isinstance(chunk, _Spooled):
            assert spool is not None, "a spooled chunk without a spool"
            chunk = spool.take(chunk.at, chunk.size)
        # Not before `take`: if that fails, the caller must still find the chunk here to free its space in the spool.
        del self.chunks[index]
        return memoryview(chunk)[HEADER_BYTES:]


def cost_bytes(size: int) -> int:
    """Return the most memory of an unfinished transfer of ``size`` bytes, which chunks of the shortest length take."""
    chunks = size // MIN_CHUNK_BYTES + 1
    return size + chunks * (HEADER_BYTES + CHUNK_OVERHEAD_BYTES) + TRANSFER_OVERHEAD_BYTES


class Reassembler:
    """Joins the chunks of many sources into transfers. It is not thread-safe and has no clock of its own.

    A transfer is identified by source, kind, round, id, size and chunk length. A completed transfer is forgotten at once: a
    duplicate chunk that arrives later starts it again, so the caller must recognise transfers that it has and `drop` them.

    Memory. A transfer takes memory for the chunks received, not for the size that it announces. The caller passes to `add` the
    largest size of each kind that the source may send; the first chunk of anything larger is refused. A source has a budget:
    the cost of ``whole_transfers`` transfers of the largest size, and ``max_per_source`` unfinished transfers. If a chunk
    would exceed it, the source's transfer whose last chunk is oldest is dropped. No source takes memory from another, so n
    sources hold at most n budgets. The caller must therefore check before `add` that it knows the source: a device of the
    roster, or a topic that it subscribed to.

    All uploads of a fleet may be unfinished at one time. Chunks beyond ``memory_bytes`` are therefore moved to the spool, if
    there is one, and read back when their transfer is complete.

    Attacks. The source is the name in the topic, and only the broker's access list binds that name to a sender. On a broker
    without one, any client can write chunks under a device's name. They share the device's budget, and they can displace its
    unfinished upload or corrupt it with a wrong chunk of the same id, so that the digest fails and the upload is dropped. The
    device's reminders then make the aggregator request the upload again. Such an attacker can delay one device while the
    flood lasts, and the upload arrives afterwards. A forged payload is never accepted, since digest and signature are
    checked. With the access list of `shoal-fleet broker-config` only the device itself can do this.

    Args:
        max_transfer_bytes: largest payload in calls of `add` without ``allowed``.
        whole_transfers: unfinished transfers of the largest size that a source's budget covers.
        max_per_source: most unfinished transfers of a source, of any size.
        deadline_s: `expire` drops a transfer this long after its first chunk.
        spool: storage for chunks beyond ``memory_bytes``; without it all stay in memory.
        memory_bytes: most memory of all unfinished transfers together if there is a spool.
    """

    def __init__(
        self,
        max_transfer_bytes: int = limits.MAX_TRANSFER_BYTES,
        whole_transfers: int = 2,
        max_per_source: int = limits.MAX_TRANSFERS_PER_SOURCE,
        deadline_s: float = limits.REASSEMBLY_DEADLINE_S,
        spool: Spool | None = None,
        memory_bytes: int = limits.REASSEMBLY_MEMORY_BYTES,
    ) -> None:
        self._max_transfer_bytes = max_transfer_bytes
        self._whole_transfers = whole_transfers
        self._max_per_source = max_per_source
        self._deadline_s = deadline_s
        self._sources: dict[str, dict[_Key, _Pending]] = {}
        self._held: Counter[str] = Counter()
        self._held_bytes = 0
        self._spool = spool
        self._memory_bytes = memory_bytes
        self._spooled_bytes = 0
        self._fed_s = -math.inf
        self._refused: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        """Memory of all unfinished transfers: book-keeping, and the chunks that are not in the spool."""
        return self._held_bytes - self._spooled_bytes

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of refused chunks and dropped transfers by reason.

        Keys: malformed, oversized, no-room and digest, which raise; duplicate, displaced and expired, which don't.
        """
        return MappingProxyType(self._refused)

    def __len__(self) -> int:
        return sum(len(transfers) for transfers in self._sources.values())

    def budget_bytes(self, most_bytes: int) -> int:
        """Return the memory budget of a source whose largest transfer has ``most_bytes``."""
        return self._whole_transfers * cost_bytes(most_bytes)

    def add(
        self,
        source: str,
        chunk: bytes | memoryview,
        now_s: float,
        allowed: Mapping[ChunkKind, int] | None = None,
    ) -> Transfer | None:
        """Add one chunk of ``source``; return the transfer if this chunk completes it, else None.

        Args:
            source: the sender, which only the broker authenticates: the device in the topic.
            chunk: header and payload. The payload of a single-chunk transfer is a view of it.
            now_s: seconds of a monotonic clock, the same one in every call.
            allowed: the largest payload of each kind that ``source`` may send; other kinds are refused. None allows
                ``max_transfer_bytes`` of every kind.

        Raises:
            LaterKindError: the chunk is of a later version's optional kind: skip it.
            TooLargeError: the transfer is larger than ``allowed``.
            WireError: the chunk is malformed, the digest is wrong, or neither memory nor the spool has room.
        """
        found = self.collect(source, chunk, now_s, allowed)
        return None if found is None else self.join(found)

    def join(self, chunks: ReceivedChunks) -> Transfer:
        """Return the transfer that `collect` has completed; see `ReceivedChunks.join`."""
        try:
            return chunks.join()
        except DigestError:
            self.count_refused("digest")
            raise
        except NoRoomError:
            self.count_refused("no-room")
            raise

    def count_refused(self, reason: str) -> None:
        """Count a transfer in `refused`."""
        self._refused[reason] += 1

    def collect(
        self,
        source: str,
        chunk: bytes | memoryview,
        now_s: float,
        allowed: Mapping[ChunkKind, int] | None = None,
        *,
        parsed: tuple[ChunkHeader, memoryview] | None = None,
    ) -> ReceivedChunks | None:
        """Add one chunk as `add` does, but leave joining and hashing to the caller.

        Args:
            source: as in `add`.
            chunk: as in `add`.
            now_s: as in `add`.
            allowed: as in `add`.
            parsed: what `shoal.protocol.chunking.parse` has returned for the chunk; None parses it here.

        Raises:
            TooLargeError: the transfer is larger than ``allowed``.
            WireError: the chunk is malformed, or neither memory nor the spool has room.
        """
        try:
            header, body = parse(chunk) if parsed is None else parsed
        except WireError as error:
            if not isinstance(error, LaterKindError):
                self._refused["malformed"] += 1
            raise
        most = self._max_transfer_bytes if allowed is None else allowed.get(header.kind, 0)
        if header.size > most:
            self._refuse_size(header, most)
        if header.total == 1:
            return ReceivedChunks(source, header, [body])
        key = (header.kind, header.round, header.transfer_id, header.size, header.chunk_bytes)
        transfers = self._sources.get(source, {})
        pending = transfers.get(key)
        if pending is None:
            pending = _Pending(header.total, now_s, now_s, now_s)
            self._hold(source, TRANSFER_OVERHEAD_BYTES)
            transfers = self._sources.setdefault(source, transfers)
        elif header.index in pending.chunks:
            self._refused["duplicate"] += 1
            return None
        else:
            del transfers[key]
        transfers[key] = pending  # moved to the end: `_make_room` drops the first entry, whose last chunk is oldest
        cost = len(body) + HEADER_BYTES + CHUNK_OVERHEAD_BYTES
        self._make_room(source, cost, most if allowed is None else max(allowed.values()))
        pending.touched_s = self._fed_s = now_s
        pending.chunks[header.index] = self._keep(chunk if isinstance(chunk, bytes) else bytes(chunk), cost)
        pending.held_bytes += cost
        self._hold(source, cost)
        if len(pending.chunks) < header.total:
            return None
        del self._sources[source][key]
        self._release(source, pending)
        try:
            return ReceivedChunks(source, header, pending.take(header.size, self._spool))
        except NoRoomError:
            self.count_refused("no-room")
            raise
        except OSError as error:
            self._refuse("no-room", f"a chunk can't be read again: {text_of(error)}")
        finally:
            self._free_places(pending)

    def stalled(self, now_s: float, quiet_s: float = limits.REASSEMBLY_QUIET_S) -> list[Stalled]:
        """Return the transfers that received no chunk for a while, each at most once in that time.

        The time is ``quiet_s`` seconds, or `REASSEMBLY_BUSY_S` while other transfers still receive chunks.
        """
        busy = now_s - self._fed_s < quiet_s
        patience_s = max(quiet_s, limits.REASSEMBLY_BUSY_S) if busy else quiet_s
        found = []
        for source, transfers in self._sources.items():
            for (kind, round_, name, *_), pending in transfers.items():
                if now_s - max(pending.touched_s, pending.reported_s) >= patience_s:
                    pending.reported_s = now_s
                    found.append(Stalled(source, name, kind, round_, pending.missing()))
        return found

    def missing(
        self,
        source: str,
        round_: int,
        transfer_id: bytes,
        size: int,
        chunk_bytes: int,
        now_s: float,
        kind: ChunkKind = ChunkKind.UPLOAD,
    ) -> tuple[int, ...]:
        """Return the first MAX_MISSING_LISTED missing chunks of an upload, of which perhaps none has arrived.

        `stalled` then counts the upload as reported. Chunks of the same id with another size or chunk length are dropped,
        since the chunks still to come will not fit them.
        """
        wanted = (kind, round_, transfer_id, size, chunk_bytes)
        # A device that reconnects to a broker with another packet limit splits the same upload into other chunks.
        for key in [k for k in self._sources.get(source, {}) if k[:3] == wanted[:3] and k != wanted]:
            self._forget(source, key)
        pending = self._sources.get(source, {}).get(wanted)
        if pending is None:
            return tuple(range(min(chunk_count(size, chunk_bytes), MAX_MISSING_LISTED)))
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
        """Drop the unfinished transfers of ``source``, or only those with ``transfer_id``; return their number."""
        keys = [key for key in self._sources.get(source, {}) if transfer_id in (None, key[2])]
        for key in keys:
            self._forget(source, key)
        return len(keys)

    def _make_room(self, source: str, cost: int, most_bytes: int) -> None:
        """Drop the source's transfers, oldest last chunk first, until its newest chunk fits the budget."""
        transfers, budget = self._sources[source], self.budget_bytes(most_bytes)
        # The last transfer stays: the chunk belongs to it, and the budget covers one of the largest size.
        while len(transfers) > 1 and (self._held[source] + cost > budget or len(transfers) > self._max_per_source):
            self._forget(source, next(iter(transfers)))
            self._refused["displaced"] += 1

    def _hold(self, source: str, size: int) -> None:
        self._held[source] += size
        self._held_bytes += size

    def _keep(self, chunk: bytes, cost: int) -> bytes | _Spooled:
        """Return the chunk, or its position in the spool if it would exceed the memory limit."""
        if self._spool is None or self.held_bytes + cost <= self._memory_bytes:
            return chunk
        try:
            at = self._spool.put(chunk)
        except OSError as error:  # the device will be asked for the chunk when there may be room again
            self._refuse("no-room", f"a chunk can't be stored: {text_of(error)}")
        self._spooled_bytes += len(chunk)
        return _Spooled(at, len(chunk))

    def _forget(self, source: str, key: _Key) -> None:
        """Drop a transfer and its chunks."""
        pending = self._sources[source].pop(key)
        self._release(source, pending)
        self._free_places(pending)

    def _free_places(self, pending: _Pending) -> None:
        """Free the space of a transfer's chunks that are still in the spool."""
        for chunk in pending.chunks.values():
            if isinstance(chunk, _Spooled) and self._spool is not None:
                self._spool.free(chunk.at, chunk.size)

    def _release(self, source: str, pending: _Pending) -> None:
        """Subtract a transfer that was removed from its source from the counts of bytes."""
        self._hold(source, -pending.held_bytes)
        self._spooled_bytes -= sum(chunk.size for chunk in pending.chunks.values() if isinstance(chunk, _Spooled))
        if not self._sources[source]:
            del self._sources[source], self._held[source]

    def _refuse_size(self, header: ChunkHeader, most: int) -> NoReturn:
        self._refused["oversized"] += 1
        if not most:
            raise TooLargeError(f"a transfer of kind {header.kind.name.lower()} is not expected here")
        raise TooLargeError(f"a transfer of {header.size} bytes is above {most}")

    def _refuse(self, reason: str, message: str) -> NoReturn:
        self._refused[reason] += 1
        raise WireError(message)
