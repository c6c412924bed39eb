"""Frames: the byte layout, every malformation by itself, and the reassembler's bounds."""

import hashlib
import struct

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.chunking import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    PACKET_ROOM_BYTES,
    ChunkKind,
    chunk_bytes_within,
    parse,
    split,
    transfer_id,
)
from shoal.protocol.reassembly import (
    LAZY_BYTES,
    MAX_MISSING_LISTED,
    Reassembler,
    Stalled,
    TooLargeError,
    Transfer,
    cost_bytes,
)
from tests.helpers.floods import claim

SMALL = MIN_CHUNK_BYTES
PAYLOAD = bytes(range(256)) * 10  # 2560 bytes: chunks of 1024, 1024 and 512


def chunks(payload: bytes = PAYLOAD, number: int = 7, kind: ChunkKind = ChunkKind.UPLOAD) -> list[bytes]:
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
    header, body = parse(chunks(kind=ChunkKind.MODEL)[2])
    assert (header.kind, header.round, header.index, header.total) == (ChunkKind.MODEL, 7, 2, 3)
    assert (header.offset, header.size, header.chunk_bytes) == (2048, 2560, 1024)
    assert body == PAYLOAD[2048:]


def test_a_payload_that_fits_is_one_chunk_and_a_packet_is_never_too_large() -> None:
    assert len(split(b"x", kind=ChunkKind.ROUND, round=0)) == 1
    assert len(split(bytes(limits.CHUNK_BYTES), kind=ChunkKind.UPLOAD, round=0)) == 1
    assert len(split(bytes(limits.CHUNK_BYTES + 1), kind=ChunkKind.UPLOAD, round=0)) == 2
    largest = split(bytes(MAX_CHUNK_BYTES + 1), kind=ChunkKind.UPLOAD, round=0, chunk_bytes=MAX_CHUNK_BYTES)
    assert max(map(len, largest)) <= limits.MAX_PACKET_BYTES


def test_only_the_missing_chunks_are_made_on_request() -> None:
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
def test_split_refuses_what_the_format_can_not_say(arguments: dict[str, object]) -> None:
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
        (forge(kind=13), "kind 13"),
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
def test_each_malformation_is_refused_with_its_reason(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        parse(data)


def test_a_transfer_is_complete_with_its_last_chunk_in_any_order() -> None:
    one = Reassembler()
    first, second, third = chunks()
    assert one.add("a", third, 0.0) is None
    assert one.add("a", first, 0.0) is None
    transfer = one.add("a", second, 0.0)
    assert isinstance(transfer, Transfer)
    assert (transfer.source, transfer.kind, transfer.round) == ("a", ChunkKind.UPLOAD, 7)
    assert transfer.payload == PAYLOAD
    assert transfer.transfer_id == transfer_id(PAYLOAD)
    assert len(one) == one.held_bytes == 0


def test_a_large_transfer_comes_out_of_lazily_mapped_memory() -> None:
    payload = bytes(range(256)) * (LAZY_BYTES // 256) + b"tail"
    one = Reassembler()
    found = [one.add("a", chunk, 0.0) for chunk in split(payload, kind=ChunkKind.MODEL, round=1)]
    assert found[:-1] == [None] * (len(found) - 1)
    assert found[-1] is not None
    assert found[-1].payload == payload
    assert found[-1].payload.readonly


def test_a_single_chunk_is_complete_at_once_and_not_copied() -> None:
    chunk = split(b"small", kind=ChunkKind.STATE, round=0)[0]
    transfer = Reassembler().add("a", chunk, 0.0)
    assert transfer is not None
    assert transfer.payload == b"small"
    assert transfer.payload.obj is chunk


def test_a_duplicate_is_ignored_and_counted() -> None:
    one = Reassembler()
    first, second, third = chunks()
    for chunk in (first, first, second, first):
        assert one.add("a", chunk, 0.0) is None
    assert one.refused["duplicate"] == 2
    assert one.add("a", third, 0.0) is not None


def test_sources_and_rounds_do_not_mix() -> None:
    one = Reassembler()
    first, second, third = chunks()
    other = chunks(number=8)
    one.add("a", first, 0.0)
    one.add("b", second, 0.0)
    one.add("a", other[1], 0.0)
    assert one.add("a", third, 0.0) is None
    assert len(one) == 3
    assert one.add("a", second, 0.0) is not None


def test_a_wrong_digest_is_refused_and_forgotten() -> None:
    one = Reassembler()
    first, second, third = chunks()
    one.add("a", first, 0.0)
    one.add("a", forge(second, body=bytes(1024)), 0.0)
    with pytest.raises(WireError, match="transfer id"):
        one.add("a", third, 0.0)
    with pytest.raises(WireError, match="transfer id"):
        one.add("a", forge(split(b"abc", kind=ChunkKind.ROUND, round=0)[0], body=b"abd"), 0.0)
    assert one.refused["digest"] == 2
    assert len(one) == one.held_bytes == 0


def test_a_chunk_of_another_size_or_length_does_not_block_the_true_transfer() -> None:
    """Whichever comes first: the true size is part of what names a transfer."""
    one = Reassembler()
    first, second, third = chunks()
    one.add("a", forge(second, size=4096, total=4), 0.0)
    one.add("a", forge(second, size=2600, total=3), 0.0)
    one.add("a", first, 0.0)
    one.add("a", forge(first, total=2, body=bytes(1280)), 0.0)
    one.add("a", second, 0.0)
    transfer = one.add("a", third, 0.0)
    assert transfer is not None
    assert transfer.payload == PAYLOAD


def test_malformed_and_oversized_chunks_are_counted() -> None:
    one = Reassembler(max_transfer_bytes=2559)
    with pytest.raises(WireError):
        one.add("a", b"noise", 0.0)
    with pytest.raises(WireError, match="above 2559"):
        one.add("a", chunks()[0], 0.0)
    assert dict(one.refused) == {"malformed": 1, "oversized": 1}
    assert len(one) == 0


def test_a_sources_oldest_transfer_gives_way_to_its_fifth() -> None:
    one = Reassembler(max_per_source=4)
    for number in range(5):
        one.add("a", chunks(bytes([number]) * 2560)[0], float(number))
    assert len(one) == 4
    assert one.refused["displaced"] == 1
    gone = chunks(bytes([0]) * 2560)
    one.drop("a")
    assert one.add("a", gone[1], 9.0) is None


def test_the_transfer_that_waited_longest_for_a_chunk_gives_way() -> None:
    """Not the one that began first: an upload on its way outlives others that have stopped."""
    one = Reassembler(max_per_source=2)
    first, second, third = chunks()
    one.add("a", first, 0.0)
    one.add("a", chunks(bytes(2560))[0], 1.0)
    one.add("a", second, 2.0)
    one.add("a", chunks(bytes([1]) * 2560)[0], 3.0)
    assert one.add("a", third, 4.0) is not None


@pytest.mark.parametrize("largest", [3_000, 50_000, 600_000])
def test_no_source_can_keep_the_transfer_of_another_out(largest: int) -> None:
    """However much a source sends: it stays within its own budget and takes nothing from the others."""
    allowed = {ChunkKind.UPLOAD: largest}
    one = Reassembler()
    one.add("modest", chunks()[0], 0.0, allowed)
    for number in range(40):
        whole = split(bytes([number]) * largest, kind=ChunkKind.UPLOAD, round=7, chunk_bytes=SMALL)
        for chunk in whole[:-1]:
            one.add("greedy", chunk, 1.0, allowed)
            assert one.held_bytes <= one.budget_bytes(largest) + 4 * SMALL
    assert one.refused["displaced"] >= 36
    one.add("modest", chunks()[1], 2.0, allowed)
    assert one.add("modest", chunks()[2], 2.0, allowed) is not None


def test_a_transfer_of_the_largest_size_fits_its_budget_in_the_shortest_chunks() -> None:
    size = 200 * SMALL + 1
    one = Reassembler(whole_transfers=1)
    payload = bytes(size)
    whole = split(payload, kind=ChunkKind.UPLOAD, round=7, chunk_bytes=SMALL)
    one.add("a", chunks()[0], 0.0, {ChunkKind.UPLOAD: size})
    found = [one.add("a", chunk, 0.0, {ChunkKind.UPLOAD: size}) for chunk in whole]
    assert found[-1] is not None
    assert one.held_bytes <= cost_bytes(2560)


def test_what_a_source_may_not_send_is_refused_at_its_first_chunk() -> None:
    one = Reassembler()
    allowed = {ChunkKind.UPLOAD: 2559, ChunkKind.REMINDER: 2560}
    with pytest.raises(TooLargeError, match="2560 bytes is above 2559"):
        one.add("a", chunks()[2], 0.0, allowed)
    with pytest.raises(TooLargeError, match="kind model is not expected"):
        one.add("a", chunks(kind=ChunkKind.MODEL)[0], 0.0, allowed)
    with pytest.raises(TooLargeError):
        one.add("a", split(b"x", kind=ChunkKind.MODEL, round=0)[0], 0.0, allowed)
    assert one.refused["oversized"] == 3
    assert one.held_bytes == len(one) == 0


@pytest.mark.parametrize("size", [LAZY_BYTES - 1, limits.MAX_TRANSFER_BYTES])
def test_memory_grows_with_what_arrived_not_with_what_is_announced(size: int) -> None:
    import tracemalloc

    one = Reassembler()
    claims = [claim(ChunkKind.UPLOAD, size, number) for number in range(200)]
    tracemalloc.start()
    try:
        for number, chunk in enumerate(claims):
            assert one.add(f"source-{number}", bytes(bytearray(chunk)), 0.0) is None
        grown, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(one) == 200
    assert 200 * len(claims[0]) <= grown <= most <= 1.25 * one.held_bytes
    assert one.held_bytes <= 200 * (len(claims[0]) + 2048)


def test_a_quiet_transfer_is_reported_once_a_period_with_what_it_lacks() -> None:
    one = Reassembler()
    first, second, third = chunks()
    one.add("a", second, 10.0)
    expected = [Stalled("a", transfer_id(PAYLOAD), ChunkKind.UPLOAD, 7, (0, 2))]
    assert one.stalled(11.9, 2.0) == []
    assert one.stalled(12.0, 2.0) == expected
    assert one.stalled(13.9, 2.0) == []
    assert one.stalled(14.0, 2.0) == expected
    one.add("a", first, 14.5)
    assert one.stalled(16.0, 2.0) == []
    assert one.stalled(16.5, 2.0)[0].missing == (2,)
    one.add("a", third, 17.0)
    assert one.stalled(99.0, 2.0) == []


def test_duplicates_do_not_hide_that_a_transfer_is_stalled() -> None:
    """A resend of what is there already brings nothing: the quiet period goes on, and what is missing is asked for."""
    one = Reassembler()
    _, second, _ = chunks()
    one.add("a", second, 10.0)
    assert one.add("a", second, 11.5) is None
    assert one.stalled(11.9, 2.0) == []
    (report,) = one.stalled(12.0, 2.0)
    assert report.missing == (0, 2)


def test_what_waits_behind_others_is_not_taken_for_lost() -> None:
    """On a slow link the chunks of a fleet come one by one: nothing is asked for before its turn may have passed."""
    one = Reassembler()
    one.add("a", chunks()[0], 0.0)
    others = chunks(bytes(SMALL * 100))
    for second in range(31):
        assert one.stalled(second, 2.0) == ([] if second < 30 else [Stalled("a", transfer_id(PAYLOAD), 1, 7, (1, 2))])
        one.add("b", others[second], float(second))
    assert one.stalled(31.9, 2.0) == []
    assert [s.source for s in one.stalled(32.0, 2.0)] == ["a", "b"]


def test_what_is_missing_of_one_transfer_can_be_asked() -> None:
    one = Reassembler()
    wanted = (7, transfer_id(PAYLOAD), len(PAYLOAD), SMALL)
    assert one.missing("a", *wanted, 0.0) is None
    one.add("a", chunks()[1], 0.0)
    one.add("a", chunks(number=8)[0], 0.0)
    one.add("a", chunks(kind=ChunkKind.MODEL)[0], 0.0)
    assert one.missing("a", *wanted, 1.0) == (0, 2)
    assert one.missing("b", *wanted, 1.0) is None
    assert one.missing("a", 7, bytes(16), len(PAYLOAD), SMALL, 1.0) is None
    one.drop("a", None)
    one.add("a", chunks()[1], 0.0)
    assert one.missing("a", *wanted, 1.0) == (0, 2)
    assert one.stalled(2.9, 2.0) == [], "asked for a moment ago"
    assert [s.missing for s in one.stalled(3.0, 2.0)] == [(0, 2)]


def test_what_came_in_chunks_of_another_length_is_given_up() -> None:
    """The device has found a broker that takes smaller packets: what it will send does not fit what came."""
    one = Reassembler()
    one.add("a", chunks()[1], 0.0)
    assert one.missing("a", 7, transfer_id(PAYLOAD), len(PAYLOAD), SMALL - 1, 1.0) is None
    assert len(one) == 0


def test_a_long_list_of_missing_chunks_is_cut() -> None:
    one = Reassembler()
    one.add("a", chunks(bytes(SMALL * (MAX_MISSING_LISTED + 10)))[5], 0.0)
    (report,) = one.stalled(9.0, 2.0)
    assert len(report.missing) == MAX_MISSING_LISTED
    assert report.missing[:6] == (0, 1, 2, 3, 4, 6)


def test_a_transfer_past_its_deadline_is_dropped_even_if_it_trickles() -> None:
    one = Reassembler(deadline_s=10.0)
    first, second, _ = chunks()
    one.add("a", first, 0.0)
    one.add("a", second, 9.0)
    assert one.expire(9.9) == []
    assert one.expire(10.0) == [Stalled("a", transfer_id(PAYLOAD), ChunkKind.UPLOAD, 7, (2,))]
    assert len(one) == one.held_bytes == 0
    assert one.refused["expired"] == 1


def test_drop_forgets_one_transfer_or_all_of_a_source() -> None:
    one = Reassembler()
    other = bytes(2560)
    one.add("a", chunks()[0], 0.0)
    one.add("a", chunks(other)[0], 0.0)
    one.add("b", chunks()[0], 0.0)
    assert one.drop("a", transfer_id(other)) == 1
    assert one.drop("a") == 1
    assert one.drop("a") == one.drop("nobody") == 0
    assert len(one) == 1
    assert SMALL < one.held_bytes <= cost_bytes(SMALL)


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
