"""Split a payload into chunks that fit a packet, and parse and check received chunks.

Every chunk begins with a header of 52 bytes, little-endian, by which it can be checked on its own:

    magic "SHL1" | version u8 | kind u8 | flags u16 = 0 | round u32 | index u32 | total u32 | offset u64 | size u64 | id 16

``id`` is the first 16 bytes of the payload's SHA-256: it names the transfer and verifies the reassembled payload. All chunks
of a transfer but the last have one length, so offset, size and total must agree in every header.

A sealed payload ends with a signature over the digest of the bytes before it. `Fingerprint` computes both digests, with and
without that trailer, in one pass, since hashing takes most of the time of a large transfer.

Example: ``split`` cuts 300,000 bytes into three chunks of 122,880, 122,880 and 54,240 bytes, and `shoal.protocol.reassembly`
joins them in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from shoal import limits
from shoal.digests import Sha256, sha256
from shoal.errors import LaterKindError, WireError

MAGIC: Final = b"SHL1"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sBBHIIIQQ16s")
HEADER_BYTES: Final = HEADER.size
TRANSFER_ID_BYTES: Final = 16

TRAILER_BYTES: Final = 64
"""Length of the signature that ends a sealed payload."""

MIN_CHUNK_BYTES: Final = 1024
"""Shortest chunk of a transfer of several: limits the number of chunks, and so the book-keeping, of one transfer."""

PACKET_ROOM_BYTES: Final = 1024
"""Room in a packet for a chunk's header, the topic and MQTT's own header."""

MAX_CHUNK_BYTES: Final = limits.MAX_PACKET_BYTES - PACKET_ROOM_BYTES
"""Longest chunk."""

_ROUND_LIMIT: Final = 1 << 32


class ChunkKind(IntEnum):
    """The kind of message in a transfer."""

    UPLOAD = 1
    PLAN = 3
    ROSTER = 4
    ROUND = 5
    CONTROL = 6
    STATE = 7
    ENROL = 8
    GRANT = 9
    DECLINE = 11
    REMINDER = 12
    RECEIVING = 13
    MEAN = 14
    CHECKPOINT = 15
    REQUEST = 16
    ANSWER = 17
    NOTICE = 18
    PART = 19
    MEAN_PART = 20
    JOB = 21
    REPORT = 22
    ORDER = 23
    DONE = 24
    CELLS = 25
    SUMS = 26
    REFUSAL = 128
    ROUND_AGAIN = 160


OPTIONAL_KINDS: Final = range(128, 256)
"""Kinds that a receiver which does not know them skips, where it refuses any other unknown kind."""
_KINDS: Final = frozenset(int(kind) for kind in ChunkKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """A checked header: its numbers are consistent and within limits.

    Attributes:
        kind: kind of message in the transfer.
        round: round number, 0 if absent.
        index: number of this chunk, below ``total``.
        total: number of chunks of the transfer.
        offset: position of this chunk in the payload, in bytes.
        size: bytes of the whole payload.
        transfer_id: first 16 bytes of the payload's SHA-256.
        chunk_bytes: length of every chunk but the last; ``size`` if there is only one.
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
    """Two digests of a payload, computed in one pass.

    Attributes:
        transfer_id: first 16 bytes of the SHA-256 of the payload.
        signed: SHA-256 of all but the last TRAILER_BYTES, 32 bytes; of the whole payload if it is not longer than those.
    """

    transfer_id: bytes
    signed: bytes

    @classmethod
    def of(cls, payload: bytes | memoryview) -> Fingerprint:
        """Return the digests of ``payload``."""
        view = memoryview(payload)
        cut = max(0, len(view) - TRAILER_BYTES) or len(view)
        digest = Sha256(view[:cut])
        signed = digest.digest()
        digest.update(view[cut:])
        return cls(digest.digest()[:TRANSFER_ID_BYTES], signed)


def chunk_bytes_within(max_packet_bytes: int) -> int:
    """Return the payload length of chunks for a broker that accepts packets of at most ``max_packet_bytes``."""
    return max(MIN_CHUNK_BYTES, min(limits.CHUNK_BYTES, max_packet_bytes - PACKET_ROOM_BYTES))


def chunk_count(size: int, chunk_bytes: int) -> int:
    """Return the number of chunks of ``chunk_bytes`` in a payload of ``size`` bytes."""
    return -(-size // chunk_bytes)


def transfer_id(payload: bytes | memoryview) -> bytes:
    """Return the 16 bytes that name ``payload``: the beginning of its SHA-256."""
    return sha256(payload)[:TRANSFER_ID_BYTES]


class Payload(Protocol):
    """Bytes to send, in memory or elsewhere."""

    def __len__(self) -> int:
        """Return the number of bytes."""

    def __getitem__(self, part: slice, /) -> Payload:
        """Return a part of them."""

    def __bytes__(self) -> bytes:
        """Return them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk to send: its header, and the part of the payload, which is copied only as it leaves (``bytes(chunk)``)."""

    header: bytes
    body: memoryview | Payload

    def __len__(self) -> int:
        return len(self.header) + len(self.body)

    def __bytes__(self) -> bytes:
        return self.header + bytes(self.body)


def split(
    payload: bytes | memoryview | Payload,
    *,
    kind: ChunkKind,
    round: int,  # noqa: A002 - the field's name in the format
    chunk_bytes: int = limits.CHUNK_BYTES,
    indices: Iterable[int] | None = None,
    name: bytes | None = None,
) -> list[bytes]:
    """Return the chunks of `cut` as bytes."""
    cut_up = cut(payload, kind=kind, round=round, chunk_bytes=chunk_bytes, indices=indices, name=name)
    return [bytes(chunk) for chunk in cut_up]


def cut(
    payload: bytes | memoryview | Payload,
    *,
    kind: ChunkKind,
    round: int,  # noqa: A002 - the field's name in the format
    chunk_bytes: int = limits.CHUNK_BYTES,
    indices: Iterable[int] | None = None,
    name: bytes | None = None,
) -> list[Chunk]:
    """Cut ``payload`` into chunks with headers, in order.

    Args:
        payload: at least one byte, at most MAX_TRANSFER_BYTES.
        kind: kind of message in it.
        round: round number, 0 if absent.
        chunk_bytes: payload bytes of every chunk but the last.
        indices: chunks to make, for a retransmission; all by default.
        name: the payload's transfer id if it is known, which saves hashing.

    Raises:
        WireError: the payload, the round, the chunk length or an index is out of range.
    """
    body = memoryview(payload).cast("B") if isinstance(payload, bytes | memoryview) else payload
    size = len(body)
    if not 1 <= size <= limits.MAX_TRANSFER_BYTES:
        raise WireError(f"a transfer of {size} bytes is not between 1 and {limits.MAX_TRANSFER_BYTES}")
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise WireError(f"chunks of {chunk_bytes} bytes are not between {MIN_CHUNK_BYTES} and {MAX_CHUNK_BYTES}")
    if not 0 <= round < _ROUND_LIMIT:
        raise WireError(f"round {round} does not fit 32 bits")
    total = chunk_count(size, chunk_bytes)
    name = transfer_id(bytes(body)) if name is None else name
    chunks = []
    for index in range(total) if indices is None else indices:
        if not 0 <= index < total:
            raise WireError(f"chunk {index} does not exist: the transfer has {total}")
        offset = index * chunk_bytes
        header = HEADER.pack(MAGIC, VERSION, kind, 0, round, index, total, offset, size, name)
        chunks.append(Chunk(header, body[offset : offset + chunk_bytes]))
    return chunks


def parse(data: bytes | memoryview) -> tuple[ChunkHeader, memoryview]:
    """Check one chunk by its header and return the header and a view of its payload.

    Raises:
        LaterKindError: the kind is one that may be skipped.
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
        if kind in OPTIONAL_KINDS:
            raise LaterKindError(f"a message of the optional kind {kind}, which this version does not read")
        raise WireError(f"chunk kind {kind} is not known")
    # Refused rather than ignored, so that a later version may give them a meaning.
    if flags:
        raise WireError(f"chunk flags {flags:#06x} are not known")
    if not 1 <= size <= limits.MAX_TRANSFER_BYTES:
        raise WireError(f"a transfer of {size} bytes is not between 1 and {limits.MAX_TRANSFER_BYTES}")
    if index >= total:
        raise WireError(f"chunk {index} of {total} does not exist")
    chunk_bytes = _chunk_bytes(length, index, total, offset, size)
    header = ChunkHeader(
        kind=ChunkKind(kind),
        round=round_,
        index=index,
        total=total,
        offset=offset,
        size=size,
        transfer_id=name,
        chunk_bytes=chunk_bytes,
    )
    return header, view[HEADER_BYTES:]


def _chunk_bytes(length: int, index: int, total: int, offset: int, size: int) -> int:
    """Return the transfer's chunk length, derived from one chunk's header.

    Raises:
        WireError: the header contradicts itself or the chunk's length.
    """
    if length > MAX_CHUNK_BYTES:
        raise WireError(f"a chunk of {length} bytes is above {MAX_CHUNK_BYTES}")
    if total == 1:
        chunk_bytes = size
        fits = offset == 0 and length == size
    elif index < total - 1:
        chunk_bytes = length
        fits = offset == index * length and -(-size // length) == total
    else:
        # The last chunk may be shorter, so the chunk length follows from its offset, not from its own length.
        chunk_bytes, rest = divmod(offset, index)
        fits = rest == 0 and length == size - offset and length <= chunk_bytes
    if not fits:
        raise WireError(f"chunk {index} of {total}: {length} bytes at {offset} do not fit a transfer of {size}")
    if total > 1 and not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise WireError(f"chunks of {chunk_bytes} bytes are not between {MIN_CHUNK_BYTES} and {MAX_CHUNK_BYTES}")
    return chunk_bytes
