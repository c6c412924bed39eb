"""Retained payloads: one topic for a short one, a topic a chunk for a long one, and no chunk of an earlier one beside them."""

from contextlib import nullcontext

import pytest

from shoal.errors import WireError
from shoal.protocol.chunking import MIN_CHUNK_BYTES, ChunkKind, parse, transfer_id
from shoal.protocol.reassembly import Reassembler
from shoal.transport.retained import RetainedPublisher

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
    name = publisher.publish("s/round", SHORT, kind=ChunkKind.ROUND, round_=7)
    assert list(transport.retained) == ["s/round"]
    header, body = parse(transport.retained["s/round"])
    assert (header.kind, header.round, header.transfer_id, bytes(body)) == (ChunkKind.ROUND, 7, name, SHORT)
    assert name == transfer_id(SHORT)


def test_long_payload_takes_a_topic_a_chunk(publisher, transport):
    """A long payload is retained in a topic a chunk."""
    publisher.publish("s/round", LONG, kind=ChunkKind.ROUND)
    assert list(transport.retained) == ["s/round/0", "s/round/1", "s/round/2"]
    assert publisher.topics() == ("s/round/0", "s/round/1", "s/round/2")
    assert joined(transport) == LONG


@pytest.mark.parametrize(("first", "second"), [(LONG, SHORT), (SHORT, LONG), (LONG + LONG, LONG)])
def test_later_payload_leaves_no_old_chunk(publisher, transport, first, second):
    """A later payload leaves no chunk of the earlier one."""
    publisher.publish("s/round", first, kind=ChunkKind.ROUND)
    publisher.publish("s/round", second, kind=ChunkKind.ROUND)
    assert joined(transport) == second
    assert set(publisher.topics()) == set(transport.retained)


def test_reused_topics_are_not_cleared(publisher, transport):
    """A subscriber that came between the two would find nothing."""
    publisher.publish("s/round", LONG, kind=ChunkKind.ROUND)
    transport.sent.clear()
    publisher.publish("s/round", LONG[::-1], kind=ChunkKind.ROUND)
    assert [topic for topic, _ in transport.sent] == ["s/round/0", "s/round/1", "s/round/2"]
    assert all(payload for _, payload in transport.sent)


def test_payloads_of_other_bases_stay(publisher, transport):
    publisher.publish("a", SHORT, kind=ChunkKind.ROUND)
    publisher.publish("b", LONG, kind=ChunkKind.MEAN)
    publisher.clear("b")
    assert list(transport.retained) == ["a"]
    assert publisher.bases() == ("a",)
    publisher.clear("unknown")
    assert list(transport.retained) == ["a"]


def test_known_transfer_id_is_used_as_it_is(publisher, transport):
    """The digest of a large payload takes most of the time of a publish."""
    assert publisher.publish("a", SHORT, kind=ChunkKind.ROUND, name=b"n" * 16) == b"n" * 16
    assert parse(transport.retained["a"])[0].transfer_id == b"n" * 16


def test_all_is_published_after_a_loss(publisher, transport):
    """All payloads are published again after the broker lost them."""
    publisher.publish("a", SHORT, kind=ChunkKind.ROUND)
    publisher.publish("b", LONG, kind=ChunkKind.MEAN)
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


def test_adopting_keeps_the_payload(publisher, transport):
    """The broker sends a program's own retained messages back to it."""
    publisher.publish("a", SHORT, kind=ChunkKind.ROUND)
    publisher.adopt("a")
    transport.retained.clear()
    publisher.republish()
    assert joined(transport) == SHORT


def test_empty_payload_is_refused(publisher, transport):
    """An empty payload is refused and the earlier one stays."""
    publisher.publish("a", SHORT, kind=ChunkKind.ROUND)
    with pytest.raises(WireError):
        publisher.publish("a", b"", kind=ChunkKind.ROUND)
    assert joined(transport) == SHORT
