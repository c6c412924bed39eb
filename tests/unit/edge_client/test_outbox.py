"""What an upload costs in acknowledgements: none at its first sending, one a chunk where it is sent again."""

import pytest

from crypto.seal.replay import HighWater
from edge_client.outbox import Outbox
from wire.frame import parse

MARK = HighWater(roster=1, run=1, round=3, nonce=bytes(16))
FIRST, SECOND = bytes(15) + b"1", bytes(15) + b"2"


class Recorder:
    """A transport that keeps (index, qos) of every chunk."""

    chunk_bytes = 1024

    def __init__(self):
        self.sent = []

    def publish(self, topic, payload, *, retain=False, qos=1):
        assert (topic, retain) == ("up", False)
        self.sent.append((parse(payload)[0].index, qos))


class Files:
    """A state directory that takes everything."""

    def save_pending(self, mark, transfer, sealed):
        pass


@pytest.fixture
def recorder():
    return Recorder()


def test_the_first_sending_is_not_acknowledged(recorder):
    outbox = Outbox(Files(), recorder, "up", b"")
    outbox.keep(MARK, FIRST, bytes(2500))
    outbox.send(MARK, FIRST, None, 10)
    assert recorder.sent == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("missing", [None, (1, 0)])
def test_what_is_sent_again_is_acknowledged_chunk_by_chunk(recorder, missing):
    """So a broker keeps all of it for an aggregator that is away."""
    outbox = Outbox(Files(), recorder, "up", b"")
    outbox.keep(MARK, FIRST, bytes(2500))
    outbox.send(MARK, FIRST, None, 10)
    recorder.sent.clear()
    outbox.send(MARK, FIRST, missing, 10)
    assert recorder.sent == [(i, 1) for i in missing or (0, 1, 2)]


def test_every_upload_has_a_first_sending(recorder):
    """Also the one that an earlier life has left."""
    outbox = Outbox(Files(), recorder, "up", bytes(1025))
    outbox.send(MARK, FIRST, None, 10)
    outbox.keep(MARK, SECOND, bytes(1025))
    outbox.send(MARK, SECOND, None, 10)
    assert recorder.sent == [(0, 0), (1, 0)] * 2


@pytest.mark.parametrize(("devices", "qos"), [(21, 0), (22, 1), (5000, 1)])
def test_the_first_sending_is_acknowledged_where_a_broker_would_hold_chunks_back(recorder, devices, qos):
    """64 may be under way to the aggregator: those at QoS 0 would overtake the others, and mix the uploads."""
    outbox = Outbox(Files(), recorder, "up", bytes(2500))
    outbox.send(MARK, FIRST, None, devices)
    assert {q for _, q in recorder.sent} == {qos}
