"""Reassembly of transfers: complete payloads, wrong digests, duplicates, memory budgets, and reports of missing chunks."""

import tracemalloc

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.chunking import ChunkKind, split, transfer_id
from shoal.protocol.reassembly import (
    LAZY_BYTES,
    MAX_MISSING_LISTED,
    Reassembler,
    Stalled,
    TooLargeError,
    Transfer,
    cost_bytes,
)
from tests.helpers.chunks import PAYLOAD, SMALL, chunks, forge
from tests.helpers.floods import claim


@pytest.fixture
def one() -> Reassembler:
    return Reassembler()


def test_complete_in_any_order(one: Reassembler) -> None:
    """A transfer is complete with its last chunk in any order."""
    first, second, third = chunks()
    assert one.add("a", third, 0.0) is None
    assert one.add("a", first, 0.0) is None
    transfer = one.add("a", second, 0.0)
    assert isinstance(transfer, Transfer)
    assert (transfer.source, transfer.kind, transfer.round) == ("a", ChunkKind.UPLOAD, 7)
    assert transfer.payload == PAYLOAD
    assert transfer.transfer_id == transfer_id(PAYLOAD)
    assert len(one) == one.held_bytes == 0


def test_large_transfer_is_mapped_lazily(one: Reassembler) -> None:
    """A large transfer comes out of lazily mapped memory; a single chunk is complete at once and not copied."""
    payload = bytes(range(256)) * (LAZY_BYTES // 256) + b"tail"
    found = [one.add("a", chunk, 0.0) for chunk in split(payload, kind=ChunkKind.MEAN, round=1)]
    assert found[:-1] == [None] * (len(found) - 1)
    assert found[-1] is not None
    assert found[-1].payload == payload
    assert found[-1].payload.readonly
    chunk = split(b"small", kind=ChunkKind.STATE, round=0)[0]
    transfer = one.add("a", chunk, 0.0)
    assert transfer is not None
    assert transfer.payload == b"small"
    assert transfer.payload.obj is chunk


def test_a_duplicate_is_ignored_and_counted(one: Reassembler) -> None:
    """It does not restart the quiet period."""
    first, second, third = chunks()
    for chunk in (first, first, second, first):
        assert one.add("a", chunk, 0.0) is None
    assert one.refused["duplicate"] == 2
    assert one.add("a", first, 1.5) is None
    assert one.stalled(1.9, 2.0) == []
    (report,) = one.stalled(2.0, 2.0)
    assert report.missing == (2,)
    assert one.add("a", third, 3.0) is not None


def test_sources_and_rounds_do_not_mix(one: Reassembler) -> None:
    first, second, third = chunks()
    other = chunks(number=8)
    one.add("a", first, 0.0)
    one.add("b", second, 0.0)
    one.add("a", other[1], 0.0)
    assert one.add("a", third, 0.0) is None
    assert len(one) == 3
    assert one.add("a", second, 0.0) is not None


def test_wrong_digest_is_forgotten(one: Reassembler) -> None:
    """A wrong digest is refused and forgotten."""
    first, second, third = chunks()
    one.add("a", first, 0.0)
    one.add("a", forge(second, body=bytes(1024)), 0.0)
    with pytest.raises(WireError, match="transfer id"):
        one.add("a", third, 0.0)
    with pytest.raises(WireError, match="transfer id"):
        one.add("a", forge(split(b"abc", kind=ChunkKind.ROUND, round=0)[0], body=b"abd"), 0.0)
    assert one.refused["digest"] == 2
    assert len(one) == one.held_bytes == 0


def test_false_chunk_does_not_block(one: Reassembler) -> None:
    """Size and chunk length are part of a transfer's identity."""
    first, second, third = chunks()
    one.add("a", forge(second, size=4096, total=4), 0.0)
    one.add("a", forge(second, size=2600, total=3), 0.0)
    one.add("a", first, 0.0)
    one.add("a", forge(first, total=2, body=bytes(1280)), 0.0)
    one.add("a", second, 0.0)
    transfer = one.add("a", third, 0.0)
    assert transfer is not None
    assert transfer.payload == PAYLOAD


def test_fifth_transfer_displaces_the_oldest() -> None:
    """A fifth transfer of a source displaces its oldest."""
    one = Reassembler(max_per_source=4)
    for number in range(5):
        one.add("a", chunks(bytes([number]) * 2560)[0], float(number))
    assert len(one) == 4
    assert one.refused["displaced"] == 1
    gone = chunks(bytes([0]) * 2560)
    one.drop("a")
    assert one.add("a", gone[1], 9.0) is None


def test_oldest_last_chunk_is_displaced() -> None:
    """The transfer that began first stays if it still receives chunks."""
    one = Reassembler(max_per_source=2)
    first, second, third = chunks()
    one.add("a", first, 0.0)
    one.add("a", chunks(bytes(2560))[0], 1.0)
    one.add("a", second, 2.0)
    one.add("a", chunks(bytes([1]) * 2560)[0], 3.0)
    assert one.add("a", third, 4.0) is not None


@pytest.mark.slow
@pytest.mark.parametrize("largest", [3_000, 50_000, 600_000])
def test_flood_displaces_no_other_source(largest: int, one: Reassembler) -> None:
    """A flood stays within its own source's budget."""
    allowed = {ChunkKind.UPLOAD: largest}
    one.add("modest", chunks()[0], 0.0, allowed)
    for number in range(40):
        whole = split(bytes([number]) * largest, kind=ChunkKind.UPLOAD, round=7, chunk_bytes=SMALL)
        for chunk in whole[:-1]:
            one.add("greedy", chunk, 1.0, allowed)
            assert one.held_bytes <= one.budget_bytes(largest) + 4 * SMALL
    assert one.refused["displaced"] >= 36
    one.add("modest", chunks()[1], 2.0, allowed)
    assert one.add("modest", chunks()[2], 2.0, allowed) is not None


def test_largest_fits_in_shortest_chunks() -> None:
    """A transfer of the largest size fits its budget in the shortest chunks."""
    size = 200 * SMALL + 1
    one = Reassembler(whole_transfers=1)
    payload = bytes(size)
    whole = split(payload, kind=ChunkKind.UPLOAD, round=7, chunk_bytes=SMALL)
    one.add("a", chunks()[0], 0.0, {ChunkKind.UPLOAD: size})
    found = [one.add("a", chunk, 0.0, {ChunkKind.UPLOAD: size}) for chunk in whole]
    assert found[-1] is not None
    assert one.held_bytes <= cost_bytes(2560)


def test_forbidden_transfer_is_refused_first(one: Reassembler) -> None:
    """A transfer that is not allowed is refused at its first chunk. Malformed and oversized chunks are counted."""
    allowed = {ChunkKind.UPLOAD: 2559, ChunkKind.REMINDER: 2560}
    with pytest.raises(TooLargeError, match="2560 bytes is above 2559"):
        one.add("a", chunks()[2], 0.0, allowed)
    with pytest.raises(TooLargeError, match="kind mean is not expected"):
        one.add("a", chunks(kind=ChunkKind.MEAN)[0], 0.0, allowed)
    with pytest.raises(TooLargeError):
        one.add("a", split(b"x", kind=ChunkKind.MEAN, round=0)[0], 0.0, allowed)
    with pytest.raises(WireError):
        one.add("a", b"noise", 0.0)
    assert dict(one.refused) == {"malformed": 1, "oversized": 3}
    assert one.held_bytes == len(one) == 0
    with pytest.raises(WireError, match="above 2559"):
        Reassembler(max_transfer_bytes=2559).add("a", chunks()[0], 0.0)


@pytest.mark.parametrize("size", [LAZY_BYTES - 1, limits.MAX_TRANSFER_BYTES])
def test_memory_grows_with_what_arrives(size: int, one: Reassembler) -> None:
    """Memory grows with the chunks received not with the size announced."""
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


def test_quiet_transfer_is_reported_once(one: Reassembler) -> None:
    """A quiet transfer is reported once a period with its missing chunks."""
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


def test_no_report_while_others_receive(one: Reassembler) -> None:
    """On a slow link the chunks of a fleet arrive one by one."""
    one.add("a", chunks()[0], 0.0)
    others = chunks(bytes(SMALL * 100))
    for second in range(31):
        assert one.stalled(second, 2.0) == ([] if second < 30 else [Stalled("a", transfer_id(PAYLOAD), 1, 7, (1, 2))])
        one.add("b", others[second], float(second))
    assert one.stalled(31.9, 2.0) == []
    assert [s.source for s in one.stalled(32.0, 2.0)] == ["a", "b"]


def test_missing_chunks_are_named(one: Reassembler) -> None:
    """The missing chunks of one upload are named. After a reconnection to a broker with another limit old ones don't fit."""
    wanted = (7, transfer_id(PAYLOAD), len(PAYLOAD), SMALL)
    assert one.missing("a", *wanted, 0.0) == (0, 1, 2)
    one.add("a", chunks()[1], 0.0)
    one.add("a", chunks(number=8)[0], 0.0)
    one.add("a", chunks(kind=ChunkKind.MEAN)[0], 0.0)
    assert one.missing("a", *wanted, 1.0) == (0, 2)
    assert one.missing("b", *wanted, 1.0) == (0, 1, 2)
    assert one.missing("a", 7, bytes(16), len(PAYLOAD), SMALL, 1.0) == (0, 1, 2)
    one.drop("a", None)
    one.add("a", chunks()[1], 0.0)
    assert one.missing("a", *wanted, 1.0) == (0, 2)
    assert one.stalled(2.9, 2.0) == [], "`missing` counts as a report"
    assert [s.missing for s in one.stalled(3.0, 2.0)] == [(0, 2)]
    assert one.missing("a", 7, transfer_id(PAYLOAD), len(PAYLOAD), SMALL - 1, 4.0)[0] == 0
    assert len(one) == 0
    one.add("b", chunks(bytes(SMALL * (MAX_MISSING_LISTED + 10)))[5], 5.0)
    (report,) = one.stalled(9.0, 2.0)
    assert len(report.missing) == MAX_MISSING_LISTED
    assert report.missing[:6] == (0, 1, 2, 3, 4, 6)


def test_trickling_transfer_is_dropped() -> None:
    """A transfer past its deadline is dropped even if it trickles."""
    one = Reassembler(deadline_s=10.0)
    first, second, _ = chunks()
    one.add("a", first, 0.0)
    one.add("a", second, 9.0)
    assert one.expire(9.9) == []
    assert one.expire(10.0) == [Stalled("a", transfer_id(PAYLOAD), ChunkKind.UPLOAD, 7, (2,))]
    assert len(one) == one.held_bytes == 0
    assert one.refused["expired"] == 1


def test_drop_forgets_one_or_all(one: Reassembler) -> None:
    """Drop forgets one transfer or all of a source."""
    other = bytes(2560)
    one.add("a", chunks()[0], 0.0)
    one.add("a", chunks(other)[0], 0.0)
    one.add("b", chunks()[0], 0.0)
    assert one.drop("a", transfer_id(other)) == 1
    assert one.drop("a") == 1
    assert one.drop("a") == one.drop("unknown") == 0
    assert len(one) == 1
    assert SMALL < one.held_bytes <= cost_bytes(SMALL)
