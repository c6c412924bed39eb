"""The aggregator's spool of chunks: contents, places that are used again, faults."""

import errno
import os
from contextlib import closing
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.storage.chunk_spool import ChunkSpool
from shoal.errors import IntegrityError, WireError
from shoal.protocol import reassembly
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.reassembly import Reassembler
from tests.helpers.processes import memory_bytes

LENGTHS = (1, 7, 1024, 4000)


@pytest.fixture
def spool(tmp_path):
    with closing(ChunkSpool(tmp_path)) as made:
        yield made


@pytest.fixture
def reassembler(spool):
    """Chunks that are all on the disk."""
    return Reassembler(spool=spool, memory_bytes=0)


def size_of(spool):
    return os.fstat(spool._file.fileno()).st_size


def test_no_file_appears_in_the_directory(spool, tmp_path):
    spool.put(b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_freed_place_is_used_again(spool):
    places = [spool.put(bytes([n]) * 1000) for n in range(5)]
    spool.free(places[1], 1000)
    assert spool.take(places[3], 1000) == b"\x03" * 1000
    assert {spool.put(b"a" * 1000), spool.put(b"b" * 1000)} == {places[1], places[3]}
    assert size_of(spool) <= 5 * 1024


def test_file_does_not_grow_with_lengths(spool):
    """A device chooses the lengths of its chunks, and other devices keep the spool from ever being empty."""
    spool.put(bytes(1000))
    for length in range(1024, 9 * 1024):
        spool.free(spool.put(bytes(length)), length)
    assert size_of(spool) < 9 * 10 * 1024


def test_an_empty_spool_takes_no_disk(spool):
    places = [spool.put(bytes(1000)) for _ in range(3)]
    for place in places:
        spool.take(place, 1000)
    assert size_of(spool) == 0
    assert spool.put(b"next") == 0


def test_a_file_that_was_cut_is_reported(spool):
    at = spool.put(bytes(1000))
    os.ftruncate(spool._file.fileno(), 10)
    with pytest.raises(IntegrityError, match="holds 10 bytes where 1000 were stored"):
        spool.take(at, 1000)


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.booleans(), st.sampled_from(LENGTHS), st.integers(0, 255)), max_size=60))
def test_any_order_gives_back_what_was_put(tmp_path_factory, steps):
    """Any order of puts and takes gives back what was put."""
    spool, stored = ChunkSpool(tmp_path_factory.mktemp("spool")), []
    try:
        for put, length, value in steps:
            if put or not stored:
                data = bytes([value]) * length
                stored.append((spool.put(data), data))
            else:
                at, data = stored.pop(value % len(stored))
                assert spool.take(at, len(data)) == data
        assert all(spool.take(at, len(data)) == data for at, data in stored)
    finally:
        spool.close()


def test_simultaneous_uploads_are_bounded(spool):
    """300 devices send 200 KB each, chunk by chunk in turn: nothing is complete until the last chunks."""
    bound = 4 << 20
    devices = [(f"dev-{n}", bytes([n % 256]) * 200_000) for n in range(300)]
    chunks = {name: split(payload, kind=ChunkKind.UPLOAD, round=1, chunk_bytes=50_000) for name, payload in devices}
    reassembler = Reassembler(spool=spool, memory_bytes=bound)
    before = memory_bytes()
    for index in range(3):
        for name, _ in devices:
            assert reassembler.add(name, chunks[name][index], 0.0) is None
            assert reassembler.held_bytes <= bound + 2048 * len(devices)
    assert reassembler._spooled_bytes > 150_000 * 300 - bound
    for name, payload in devices:
        assert bytes(reassembler.add(name, chunks[name][3], 0.0).payload) == payload
    assert len(reassembler) == reassembler.held_bytes == reassembler._spooled_bytes == 0
    assert size_of(spool) == 0
    assert memory_bytes() - before < 20 << 20


def test_given_up_transfer_frees_its_places(spool, reassembler):
    """A transfer that is given up frees its places."""
    for name in ("a", "b"):
        for chunk in split(bytes(10_000), kind=ChunkKind.UPLOAD, round=1, chunk_bytes=2000)[:3]:
            reassembler.add(name, chunk, 0.0)
    assert reassembler.drop("a") == 1
    assert size_of(spool) > 0
    assert len(reassembler.expire(1e9)) == 1
    assert (reassembler._spooled_bytes, size_of(spool)) == (0, 0)


def test_a_wrong_digest_frees_the_places(spool, reassembler):
    chunks = split(bytes(4000), kind=ChunkKind.UPLOAD, round=1, chunk_bytes=2000)
    reassembler.add("a", chunks[0], 0.0)
    with pytest.raises(WireError):
        reassembler.add("a", chunks[1][:-1] + b"x", 0.0)
    assert (reassembler._spooled_bytes, size_of(spool)) == (0, 0)


def test_failed_join_frees_its_places(spool, reassembler, monkeypatch):
    """A transfer that can't be joined frees its places."""
    monkeypatch.setattr(reassembly, "LAZY_BYTES", 0)
    monkeypatch.setattr(reassembly.mmap, "mmap", Mock(side_effect=OSError(errno.ENOMEM, "no memory")))
    first, second = split(bytes(4000), kind=ChunkKind.UPLOAD, round=1, chunk_bytes=2000)
    reassembler.add("a", first, 0.0)
    with pytest.raises(WireError, match="no 4000 bytes of memory"):
        reassembler.add("a", second, 0.0)
    assert size_of(spool) == 0


def test_unreadable_chunk_frees_all_places(spool, reassembler, monkeypatch):
    """A chunk that can't be read again frees the places of all."""
    *before, last = split(bytes(6000), kind=ChunkKind.UPLOAD, round=1, chunk_bytes=2000)
    for chunk in before:
        reassembler.add("a", chunk, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: b"")
        with pytest.raises(IntegrityError):
            reassembler.add("a", last, 0.0)
    assert (reassembler._spooled_bytes, size_of(spool)) == (0, 0)


def test_full_disk_refuses_chunks(spool, reassembler, monkeypatch):
    """Whoever can publish under the devices' names can fill the spool: that must not end the aggregator."""
    chunks = split(bytes(6000), kind=ChunkKind.UPLOAD, round=1, chunk_bytes=2000)
    reassembler.add("a", chunks[0], 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(WireError, match="No space left on device"):
            reassembler.add("a", chunks[1], 0.0)
    assert reassembler.refused["no-room"] == 1
    assert reassembler.add("a", chunks[1], 0.0) is None
    assert reassembler.add("a", chunks[2], 0.0) is not None
    assert reassembler.held_bytes == reassembler._spooled_bytes == size_of(spool) == 0
