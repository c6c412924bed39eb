"""The byte layout of chunks, and one refusal for each malformed header."""

import hashlib

import pytest

from shoal import limits
from shoal.errors import LaterKindError, WireError
from shoal.protocol.chunking import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    OPTIONAL_KINDS,
    PACKET_ROOM_BYTES,
    ChunkKind,
    chunk_bytes_within,
    parse,
    split,
    transfer_id,
)
from tests.helpers.chunks import PAYLOAD, SMALL, chunks, forge


def test_the_header_is_these_52_bytes() -> None:
    """A known answer: the second of three chunks of 2560 bytes in round 7."""
    name = hashlib.sha256(PAYLOAD).digest()[:16]
    expected = (
        b"SHL1" + bytes([1, 1, 0, 0])
        + bytes([7, 0, 0, 0]) + bytes([1, 0, 0, 0]) + bytes([3, 0, 0, 0])
        + bytes([0, 4, 0, 0, 0, 0, 0, 0]) + bytes([0, 10, 0, 0, 0, 0, 0, 0]) + name
    )  # fmt: skip
    assert chunks()[1] == expected + PAYLOAD[1024:2048]
    assert HEADER_BYTES == 52
    assert transfer_id(PAYLOAD) == name


def test_a_chunk_is_read_back() -> None:
    header, body = parse(chunks(kind=ChunkKind.MEAN)[2])
    assert (header.kind, header.round, header.index, header.total) == (ChunkKind.MEAN, 7, 2, 3)
    assert (header.offset, header.size, header.chunk_bytes) == (2048, 2560, 1024)
    assert body == PAYLOAD[2048:]


def test_payload_that_fits_is_one_chunk() -> None:
    """A payload that fits is one chunk and a packet is never too large."""
    assert len(split(b"x", kind=ChunkKind.ROUND, round=0)) == 1
    assert len(split(bytes(limits.CHUNK_BYTES), kind=ChunkKind.UPLOAD, round=0)) == 1
    assert len(split(bytes(limits.CHUNK_BYTES + 1), kind=ChunkKind.UPLOAD, round=0)) == 2
    largest = split(bytes(MAX_CHUNK_BYTES + 1), kind=ChunkKind.UPLOAD, round=0, chunk_bytes=MAX_CHUNK_BYTES)
    assert max(map(len, largest)) <= limits.MAX_PACKET_BYTES


def test_missing_chunks_are_made_on_request() -> None:
    """Only the missing chunks are made on request."""
    everything = chunks()
    assert split(PAYLOAD, kind=ChunkKind.UPLOAD, round=7, chunk_bytes=SMALL, indices=(2, 0)) == [
        everything[2],
        everything[0],
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"payload": b""},
        {"chunk_bytes": MIN_CHUNK_BYTES - 1},
        {"chunk_bytes": MAX_CHUNK_BYTES + 1},
        {"round": -1},
        {"round": 1 << 32},
        {"indices": (3,)},
        {"indices": (-1,)},
    ],
)
def test_split_refuses_values_outside_format(arguments: dict[str, object]) -> None:
    valid: dict[str, object] = {"payload": PAYLOAD, "kind": ChunkKind.UPLOAD, "round": 0, "chunk_bytes": SMALL}
    merged = valid | arguments
    payload = merged.pop("payload")
    with pytest.raises(WireError):
        split(payload, **merged)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no payload"),
        (chunks()[0][:HEADER_BYTES], "no payload"),
        (forge(magic=b"MQTT"), "SHL1"),
        (forge(version=2), "format 2"),
        (forge(kind=0), "kind 0"),
        (forge(kind=99), "kind 99"),
        (forge(flags=1), "flags"),
        (forge(size=0), "transfer of 0"),
        (forge(size=limits.MAX_TRANSFER_BYTES + 1), "transfer of"),
        (forge(index=3), "does not exist"),
        (forge(total=0), "does not exist"),
        (forge(total=2), "do not fit"),
        (forge(total=4), "do not fit"),
        (forge(total=1), "do not fit"),
        (forge(offset=1), "do not fit"),
        (forge(index=1), "do not fit"),
        (forge(size=3073), "do not fit"),
        (forge(size=2048), "do not fit"),
        (forge(body=bytes(800)), "do not fit"),
        (forge(body=bytes(1300)), "do not fit"),
        (forge(chunks()[2], offset=0), "do not fit"),
        (forge(chunks()[2], offset=2049), "do not fit"),
        (forge(chunks()[2], body=bytes(511)), "do not fit"),
        (forge(chunks()[2], size=4000, body=bytes(1952)), "do not fit"),
        (forge(total=2560, body=b"x"), "not between"),
        (forge(total=1, size=limits.MAX_PACKET_BYTES, body=bytes(limits.MAX_PACKET_BYTES)), "above"),
    ],
)
def test_each_malformation_has_its_reason(data: bytes, message: str) -> None:
    """Each malformation is refused with its reason."""
    with pytest.raises(WireError, match=message):
        parse(data)


@pytest.mark.parametrize(
    ("packet_bytes", "expected"),
    [
        (limits.MAX_PACKET_BYTES, limits.CHUNK_BYTES),
        (limits.CHUNK_BYTES + PACKET_ROOM_BYTES, limits.CHUNK_BYTES),
        (64 * 1024, 63 * 1024),
        (100, MIN_CHUNK_BYTES),
    ],
)
def test_chunks_fit_the_brokers_packets(packet_bytes, expected):
    assert chunk_bytes_within(packet_bytes) == expected


@pytest.mark.parametrize("kind", sorted(set(OPTIONAL_KINDS) - set(ChunkKind))[::60])
def test_later_kind_is_no_malformed_chunk(kind: int) -> None:
    """Nothing but the kind is read: the rest may have a meaning of its own."""
    chunk = bytearray(chunks()[0])
    chunk[5] = kind
    with pytest.raises(LaterKindError, match=f"optional kind {kind}"):
        parse(bytes(chunk))
    chunk[5] = OPTIONAL_KINDS[0] - 1
    with pytest.raises(WireError, match="kind 127 is not known") as caught:
        parse(bytes(chunk))
    assert not isinstance(caught.value, LaterKindError)
