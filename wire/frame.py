"""Cut a payload into chunks that fit a packet, and put them together again from anything that arrives.

Every chunk begins with the same 52 bytes, little-endian, so that each chunk can be checked on its own:

    magic "SHL1" | version u8 | kind u8 | flags u16 = 0 | round u32 | index u32 | total u32 | offset u64 | size u64 | id 16

``id`` is the first 16 bytes of the payload's SHA-256: it names the transfer and proves the reassembly. All chunks of a
transfer but the last have one length, so offset, size and total must agree in every single header.

A sealed payload ends with a signature over the digest of all before it. `Fingerprint` takes both digests, that of the whole
and that of all but the trailer, in one pass: hashing is what a large transfer costs most.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NoReturn

from wire import limits
from wire.errors import WireError

MAGIC: Final = b"SHL1"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sBBHIIIQQ16s")
HEADER_BYTES: Final = HEADER.size
TRANSFER_ID_BYTES: Final = 16

TRAILER_BYTES: Final = 64
"""Length of the signature that ends a sealed payload."""

MIN_CHUNK_BYTES: Final = 1024
"""Shortest chunk of a transfer that has several: bounds the book-keeping that a header can ask for."""

MAX_CHUNK_BYTES: Final = limits.MAX_PACKET_BYTES - 1024
"""Longest chunk: leaves room in a packet for our header, the topic and MQTT's own header."""

MAX_MISSING_LISTED: Final = 1024
"""A stalled transfer names at most this many missing chunks; the rest follows with the next report."""

LAZY_BYTES: Final = 4 << 20
"""From this size on, a transfer costs memory only where a chunk has landed: one chunk may announce a gigabyte.

Below it, memory comes from the heap, which is 15 times as fast: a fresh mapping pays a page fault for every 4 KiB.
"""

_ROUND_LIMIT: Final = 1 << 32


class ChunkKind(IntEnum):
    """What a transfer carries."""

    UPLOAD = 1
    MODEL = 2
    PLAN = 3
    ROSTER = 4
    ROUND = 5
    CONTROL = 6
    STATE = 7


_KINDS: Final = frozenset(int(kind) for kind in ChunkKind)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """A checked header: its numbers are consistent and within limits.

    Attributes:
        kind: what the transfer carries.
        round: round number, 0 where there is none.
        index: number of this chunk, below ``total``.
        total: chunks of the transfer.
        offset: where this chunk begins in the payload, in bytes.
        size: bytes of the whole payload.
        transfer_id: first 16 bytes of the payload's SHA-256.
        chunk_bytes: length of every chunk but the last; ``size`` when there is only one.
    """

    kind: ChunkKind
    round: int
    index: int
    total: int
    offset: int
    size: int
    transfer_id: bytes
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two digests of a payload, from one pass over it.

    Attributes:
        transfer_id: first 16 bytes of the SHA-256 of the whole.
        signed: SHA-256 of all but the last TRAILER_BYTES, 32 bytes; of the whole where it is not longer than that.
    """

    transfer_id: bytes
    signed: bytes

    @classmethod
    def of(cls, payload: bytes | memoryview) -> Fingerprint:
        """Hash ``payload``."""
        view = memoryview(payload)
        cut = max(0, len(view) - TRAILER_BYTES) or len(view)
        digest = hashlib.sha256(view[:cut])
        signed = digest.digest()
        digest.update(view[cut:])
        return cls(digest.digest()[:TRANSFER_ID_BYTES], signed)


def transfer_id(payload: bytes | memoryview) -> bytes:
    """Return the 16 bytes that name ``payload``: the beginning of its SHA-256."""
    return hashlib.sha256(payload).digest()[:TRANSFER_ID_BYTES]


def split(
    payload: bytes | memoryview,
    *,
    kind: ChunkKind,
    round: int,  # noqa: A002 - the field's name in the format
    chunk_bytes: int = limits.CHUNK_BYTES,
    indices: Iterable[int] | None = None,
    name: bytes | None = None,
) -> list[bytes]:
    """Cut ``payload`` into chunks with headers, in order.

    Args:
        payload: at least one byte, at most MAX_TRANSFER_BYTES.
        kind: what it carries.
        round: round number, 0 where there is none.
        chunk_bytes: payload bytes of every chunk but the last.
        indices: make only these chunks (a resend of what is missing); all of them by default.
        name: the payload's transfer id, where it is known already.

    Raises:
        WireError: the payload, the round, the chunk length or an index is out of range.
    """
    body = memoryview(payload).cast("B")
    size = len(body)
    if not 1 <= size <= limits.MAX_TRANSFER_BYTES:
        raise WireError(f"a transfer of {size} bytes is not between 1 and {limits.MAX_TRANSFER_BYTES}")
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise WireError(f"chunks of {chunk_bytes} bytes are not between {MIN_CHUNK_BYTES} and {MAX_CHUNK_BYTES}")
    if not 0 <= round < _ROUND_LIMIT:
        raise WireError(f"round {round} does not fit 32 bits")
    total = -(-size // chunk_bytes)
    name = transfer_id(body) if name is None else name
    chunks = []
    for index in range(total) if indices is None else indices:
        if not 0 <= index < total:
            raise WireError(f"chunk {index} does not exist: the transfer has {total}")
        offset = index * chunk_bytes
        header = HEADER.pack(MAGIC, VERSION, kind, 0, round, index, total, offset, size, name)
        chunks.append(b"".join((header, body[offset : offset + chunk_bytes])))
    return chunks


def parse(data: bytes | memoryview) -> tuple[ChunkHeader, memoryview]:
    """Check one chunk on its own and return its header and a view of its payload.

    Raises:
        WireError: a field is out of range or contradicts another or the chunk's length.
    """
    view = memoryview(data).cast("B")
    length = len(view) - HEADER_BYTES
    if length < 1:
        raise WireError(f"a chunk of {len(view)} bytes has no payload behind its header")
    magic, version, kind, flags, round_, index, total, offset, size, name = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise WireError("the chunk does not begin with SHL1", hint="a peer that is not Shoal writes to this topic")
    if version != VERSION:
        raise WireError(f"chunk format {version} is not known", hint=f"this side speaks format {VERSION}: update it")
    if kind not in _KINDS:
        raise WireError(f"chunk kind {kind} is not known")
    if flags:
        raise WireError(f"chunk flags {flags:#06x} are not known")
    if not 1 <= size <= limits.MAX_TRANSFER_BYTES:
        raise WireError(f"a transfer of {size} bytes is not between 1 and {limits.MAX_TRANSFER_BYTES}")
    if index >= total:
        raise WireError(f"chunk {index} of {total} does not exist")
    chunk_bytes = _chunk_bytes(length, index, total, offset, size)
    header = ChunkHeader(ChunkKind(kind), round_, index, total, offset, size, name, chunk_bytes)
    return header, view[HEADER_BYTES:]


def _chunk_bytes(length: int, index: int, total: int, offset: int, size: int) -> int:
    """Return the transfer's uniform chunk length as this chunk tells it, or refuse."""
    if length > MAX_CHUNK_BYTES:
        raise WireError(f"a chunk of {length} bytes is above {MAX_CHUNK_BYTES}")
    if total == 1:
        chunk_bytes = size
        fits = offset == 0 and length == size
    elif index < total - 1:
        chunk_bytes = length
        fits = offset == index * length and -(-size // length) == total
    else:
        chunk_bytes, rest = divmod(offset, index)
        fits = rest == 0 and length == size - offset and length <= chunk_bytes
    if not fits:
        raise WireError(f"chunk {index} of {total}: {length} bytes at {offset} do not fit a transfer of {size}")
    if total > 1 and not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise WireError(f"chunks of {chunk_bytes} bytes are not between {MIN_CHUNK_BYTES} and {MAX_CHUNK_BYTES}")
    return chunk_bytes


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
        pending.touched_s = now_s
        if pending.have[header.index]:
            self._refused["duplicate"] += 1
            return None
        pending.buffer[header.offset : header.offset + len(body)] = body
        pending.have[header.index] = 1
        pending.left -= 1
        if pending.left:
            return None
        self._forget(source, key)
        return self._complete(source, header, pending.buffer.toreadonly())

    def stalled(self, now_s: float, quiet_s: float = limits.REASSEMBLY_QUIET_S) -> list[Stalled]:
        """Return the transfers without a new chunk for ``quiet_s`` seconds, each at most once in that time."""
        found = []
        for source, transfers in self._sources.items():
            for (kind, round_, name), pending in transfers.items():
                if now_s - max(pending.touched_s, pending.reported_s) >= quiet_s:
                    pending.reported_s = now_s
                    found.append(Stalled(source, name, kind, round_, pending.missing()))
        return found

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
