"""A payload of three short chunks, and chunks of it with altered header fields."""

import struct

from shoal.protocol.chunking import HEADER_BYTES, MIN_CHUNK_BYTES, ChunkKind, split

SMALL = MIN_CHUNK_BYTES


PAYLOAD = bytes(range(256)) * 10  # 2560 bytes: chunks of 1024, 1024 and 512


def chunks(payload: bytes = PAYLOAD, number: int = 7, kind: ChunkKind = ChunkKind.UPLOAD) -> list[bytes]:
    """Return the shortest possible chunks of ``payload`` in round ``number``."""
    return split(payload, kind=kind, round=number, chunk_bytes=SMALL)


def forge(
    chunk: bytes = b"",
    *,
    body: bytes | None = None,
    **fields: object,
) -> bytes:
    """Return ``chunk`` (by default the first of PAYLOAD) with some header fields replaced."""
    names = ("magic", "version", "kind", "flags", "round", "index", "total", "offset", "size", "id")
    chunk = chunk or chunks()[0]
    values = dict(zip(names, struct.unpack("<4sBBHIIIQQ16s", chunk[:HEADER_BYTES]), strict=True)) | fields
    head = struct.pack("<4sBBHIIIQQ16s", *(values[name] for name in names))
    return head + (chunk[HEADER_BYTES:] if body is None else body)
