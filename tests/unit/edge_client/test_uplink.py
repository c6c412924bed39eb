"""Uploads: sent once, at QoS 0 if the fleet is small enough; then requested chunks and reminders."""

from contextlib import nullcontext

import pytest

from crypto.seal.envelope import SealedMessage
from crypto.seal.replay import ReplayWatermark
from edge_client.uplink import Uplink
from shoal.protocol.chunking import Fingerprint, parse

MARK = ReplayWatermark(roster=1, run=1, round=3, nonce=bytes(16))
RUN = bytes(15) + b"2"
SEALED = bytes(range(250)) * 10
BIRTH = 1_795_000_000_000_000_000


def piece(payload):
    found = Fingerprint.of(payload)
    return SealedMessage(payload, found.transfer_id, found.signed)


class Recorder:
    """A transport that records (index, qos) of every chunk, and notes that record every reminder."""

    chunk_bytes = 1024

    def __init__(self):
        self.sent = []
        self.reminders = []

    together = staticmethod(nullcontext)

    def publish(self, topic, payload, *, retain=False, qos=1):
        assert (topic, retain) == ("up", False)
        self.sent.append((parse(bytes(payload))[0].index, qos))

    def remind(self, run_id, round_, upload, *others):
        sealed = SealedMessage(bytes(upload.payload), upload.transfer_id, upload.signed)
        self.reminders.append((run_id, round_, sealed, *others))


class Files:
    """Upload files that hold the newest upload."""

    sealed = b""

    def save(self, _mark, _transfer, sealed, _residual=None, _private=b""):
        self.sealed = sealed
        return sealed

    def load(self):
        return self


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def outbox(recorder):
    outbox = Uplink(files=Files(), transport=recorder, notes=recorder, topic="up", part_topic=str, sealed=b"")
    outbox.keep(MARK, [piece(SEALED)])
    return outbox


def test_first_sending_is_not_acknowledged(outbox, recorder):
    outbox.send(MARK, None, 10)
    assert recorder.sent == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("asked", [(0, 1, 2), (1, 0), (2,)])
def test_resent_chunks_are_acknowledged(outbox, recorder, asked):
    """So that a broker stores all of it for an aggregator that is offline."""
    outbox.send(MARK, asked, 1)
    assert recorder.sent == [(i, 1) for i in asked]


@pytest.mark.parametrize(("devices", "qos"), [(21, 0), (22, 1), (5000, 1)])
def test_first_sending_is_acknowledged(outbox, recorder, devices, qos):
    """64 may be under way to the aggregator: those at QoS 0 would overtake the others, and mix the uploads."""
    outbox.send(MARK, None, devices)
    assert {q for _, q in recorder.sent} == {qos}


def test_a_reminder_identifies_the_upload(outbox, recorder):
    outbox.remind(MARK, RUN, BIRTH)
    assert recorder.reminders == [(RUN, 3, piece(SEALED), 1024, BIRTH)]
    assert recorder.sent == []


def test_upload_of_an_earlier_life(recorder):
    """An upload of an earlier life can be reminded of."""
    Uplink(files=Files(), transport=recorder, notes=recorder, topic="up", part_topic=str, sealed=SEALED).remind(
        MARK, RUN, BIRTH
    )
    assert recorder.reminders == [(RUN, 3, piece(SEALED), 1024, BIRTH)]


def test_another_upload_has_another_digest(outbox, recorder):
    outbox.remind(MARK, RUN, BIRTH)
    outbox.keep(MARK, [piece(SEALED[1:])])
    outbox.remind(MARK, RUN, BIRTH)
    assert recorder.reminders[-1][2] == piece(SEALED[1:])


def test_released_upload_is_read_again(outbox, recorder):
    """An aggregator may ask for an upload that it has acknowledged: it may have lost its store."""
    outbox.release()
    outbox.send(MARK, (2, 0), 1)
    outbox.remind(MARK, RUN, BIRTH)
    assert recorder.sent == [(2, 1), (0, 1)]
    assert recorder.reminders == [(RUN, 3, piece(SEALED), 1024, BIRTH)]
