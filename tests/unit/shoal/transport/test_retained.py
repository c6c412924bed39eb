"""Retained payloads: one topic for a short one, a topic a chunk for a long one, and no chunk of an earlier one beside them."""

from contextlib import nullcontext

import pytest

from shoal.errors import WireError
from shoal.protocol.chunking import MIN_CHUNK_BYTES, ChunkKind, parse, transfer_id
from shoal.protocol.reassembly import Reassembler
from shoal.transport import retained
from shoal.transport.retained import RetainedPublisher, out_of_memory

SHORT, LONG = b"short", bytes(range(256)) * 10  # one chunk, and three


class Recorder:
    """A transport that records publishes in order, and the topics that a broker would retain."""

    chunk_bytes = MIN_CHUNK_BYTES

    def __init__(self):
        self.sent = []
        self.retained = {}

    together = staticmethod(nullcontext)

    def publish(self, topic, payload, *, retain=False, qos=1):
        assert retain
        assert qos == 1
        payload = bytes(payload)
        self.sent.append((topic, payload))
        if payload:
            self.retained[topic] = payload
        else:
            self.retained.pop(topic, None)


@pytest.fixture
def transport():
    return Recorder()


@pytest.fixture
def publisher(transport):
    return RetainedPublisher(transport)


def joined(transport):
    """Return the payload that a new subscriber reassembles; the round and the id are in every chunk."""
    chunks = Reassembler()
    (done,) = [t for chunk in transport.retained.values() if (t := chunks.add("x", chunk, 0.0)) is not None]
    return bytes(done.payload)


def test_short_payload_is_retained_at_base(publisher, transport):
    """A known transfer id is used as it is; an empty payload is refused and the earlier one stays."""
    name = publisher.publish("s/round", SHORT, kind=ChunkKind.ROUND, round_=7)
    assert list(transport.retained) == ["s/round"]
    header, body = parse(transport.retained["s/round"])
    assert (header.kind, header.round, header.transfer_id, bytes(body)) == (ChunkKind.ROUND, 7, name, SHORT)
    assert name == transfer_id(SHORT)
    assert publisher.publish("s/round", SHORT, kind=ChunkKind.ROUND, name=b"n" * 16) == b"n" * 16
    assert parse(transport.retained["s/round"])[0].transfer_id == b"n" * 16
    with pytest.raises(WireError):
        publisher.publish("s/round", b"", kind=ChunkKind.ROUND)
    assert parse(transport.retained["s/round"])[0].transfer_id == b"n" * 16


def test_long_payload_takes_a_topic_a_chunk(publisher, transport):
    """Reused topics are not cleared: a subscriber that came between the two would find nothing."""
    topics = ("s/round/0", "s/round/1", "s/round/2")
    publisher.publish("s/round", LONG, kind=ChunkKind.ROUND)
    assert tuple(transport.retained) == publisher.topics() == topics
    assert joined(transport) == LONG
    transport.sent.clear()
    publisher.publish("s/round", LONG[::-1], kind=ChunkKind.ROUND)
    assert [(topic, bool(payload)) for topic, payload in transport.sent] == [(topic, True) for topic in topics]


@pytest.mark.parametrize(("first", "second"), [(LONG, SHORT), (SHORT, LONG), (LONG + LONG, LONG)])
def test_later_payload_leaves_no_old_chunk(publisher, transport, first, second):
    """A later payload leaves no chunk of the earlier one."""
    publisher.publish("s/round", first, kind=ChunkKind.ROUND)
    publisher.publish("s/round", second, kind=ChunkKind.ROUND)
    assert joined(transport) == second
    assert set(publisher.topics()) == set(transport.retained)


def test_payloads_of_other_bases_stay(publisher, transport):
    publisher.publish("a", SHORT, kind=ChunkKind.ROUND)
    publisher.publish("b", LONG, kind=ChunkKind.MEAN)
    publisher.clear("b")
    assert list(transport.retained) == ["a"]
    assert publisher.bases() == ("a",)
    publisher.clear("unknown")
    assert list(transport.retained) == ["a"]


def test_all_is_published_after_a_loss(publisher, transport):
    """Also what the broker has sent back to the program, which adopts its own retained messages."""
    publisher.publish("a", SHORT, kind=ChunkKind.ROUND)
    publisher.publish("b", LONG, kind=ChunkKind.MEAN)
    publisher.adopt("a")
    before = dict(transport.retained)
    transport.retained.clear()
    publisher.republish()
    assert transport.retained == before


def test_adopted_topic_is_only_cleared(publisher, transport):
    """Its payload is unknown, and an empty publish would remove the message from the broker."""
    transport.retained.update({"a": b"x", "b/0": b"x", "b/1": b"x"})
    for topic in ("a", "b/0", "b/1"):
        publisher.adopt(topic)
    assert publisher.bases() == ("a", "b")
    publisher.republish()
    assert set(transport.retained) == {"a", "b/0", "b/1"}
    assert transport.sent == []
    publisher.clear("b")
    assert set(transport.retained) == {"a"}


def test_new_payload_replaces_adopted_chunks(publisher, transport):
    transport.retained.update({f"s/round/{i}": b"x" for i in range(5)})
    for topic in list(transport.retained):
        publisher.adopt(topic)
    publisher.publish("s/round", LONG, kind=ChunkKind.ROUND)
    assert joined(transport) == LONG


# -- Bytes that wait on the disk to be sent again --


DATA = bytes(range(100))


@pytest.mark.parametrize("full", [False, True])
def test_many_bytes_are_on_the_disk(tmp_path, monkeypatch, full):
    """On a full disk they stay in memory."""
    monkeypatch.setattr(retained, "STORED_FROM_BYTES", len(DATA))
    assert out_of_memory(DATA[1:], tmp_path) == DATA[1:]
    found = out_of_memory(DATA, tmp_path / "missing" if full else tmp_path)
    assert (found is DATA) == full
    assert (len(found), bytes(found), bytes(found[90:110][2:5])) == (100, DATA, DATA[92:95])
