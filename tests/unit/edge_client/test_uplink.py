"""Uploads: sent once, at QoS 0 if the fleet is small enough; then requested chunks and reminders.

Declines and reminders: sealed to the aggregator, signed by the device, on the device's own topic.
"""

from contextlib import nullcontext

import pytest

from crypto.seal.envelope import SealedMessage, SealError, open_from_member, read_head
from crypto.seal.replay import ReplayWatermark
from edge_client.uplink import ControlMessages, Uplink
from shoal.protocol.chunking import ChunkKind, Fingerprint, parse
from shoal.protocol.codec import decode
from shoal.protocol.messages import Decline, DeclineReason, Reminder, Sealed
from shoal.protocol.reassembly import Reassembler
from tests.helpers.announced import announcement
from tests.helpers.parties import TOPICS, Parties

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


@pytest.mark.parametrize(
    ("asked", "devices", "sent"),
    [
        (None, 10, [(0, 0), (1, 0), (2, 0)]),
        # 64 may be under way to the aggregator: those at QoS 0 would overtake the others, and mix the uploads.
        (None, 21, [(0, 0), (1, 0), (2, 0)]),
        (None, 22, [(0, 1), (1, 1), (2, 1)]),
        (None, 5000, [(0, 1), (1, 1), (2, 1)]),
        # So that a broker stores all of it for an aggregator that is offline.
        ((0, 1, 2), 1, [(0, 1), (1, 1), (2, 1)]),
        ((1, 0), 1, [(1, 1), (0, 1)]),
        ((2,), 1, [(2, 1)]),
    ],
)
def test_sending_is_acknowledged_if_needed(outbox, recorder, asked, devices, sent):
    outbox.send(MARK, asked, devices)
    assert recorder.sent == sent


def test_a_reminder_identifies_the_upload(outbox, recorder):
    outbox.remind(MARK, RUN, BIRTH)
    assert recorder.reminders == [(RUN, 3, piece(SEALED), 1024, BIRTH)]
    assert recorder.sent == []
    outbox.keep(MARK, [piece(SEALED[1:])])
    outbox.remind(MARK, RUN, BIRTH)
    assert recorder.reminders[-1][2] == piece(SEALED[1:])


def test_upload_of_an_earlier_life(recorder):
    """An upload of an earlier life can be reminded of."""
    Uplink(files=Files(), transport=recorder, notes=recorder, topic="up", part_topic=str, sealed=SEALED).remind(
        MARK, RUN, BIRTH
    )
    assert recorder.reminders == [(RUN, 3, piece(SEALED), 1024, BIRTH)]


def test_released_upload_is_read_again(outbox, recorder):
    """An aggregator may ask for an upload that it has acknowledged: it may have lost its store."""
    outbox.release()
    outbox.send(MARK, (2, 0), 1)
    outbox.remind(MARK, RUN, BIRTH)
    assert recorder.sent == [(2, 1), (0, 1)]
    assert recorder.reminders == [(RUN, 3, piece(SEALED), 1024, BIRTH)]


RUN_ID, TRANSFER, DIGEST = b"r" * 16, b"t" * 16, b"d" * 32


@pytest.fixture
def parties(tmp_path):
    return Parties(tmp_path, "dev-1", "dev-2")


@pytest.fixture
def notes(parties, line):
    return ControlMessages(parties.members["dev-1"], line, TOPICS.up("dev-1"))


def received(parties, line, kind, signer="dev-1"):
    """Return (head, transfer, plaintext) of the one message sent, as the aggregator opens it."""
    ((topic, chunk, retain),) = line.sent
    assert (topic, retain) == (TOPICS.up("dev-1"), False)
    transfer = Reassembler().add("dev-1", chunk, 0.0)
    head, at = read_head(transfer.payload)
    key = parties.members[signer].identity.member.sign_key
    plain, body = open_from_member(parties.server.identity, transfer.payload, head, at, key, transfer.signed)
    assert not len(body)
    return head, transfer, decode(plain, kind)


def test_decline_names_the_reason_alone(parties, line, notes):
    """A decline names the announcement and the kind of reason alone."""
    notes.decline(announcement(round=4, run_id=RUN_ID, nonce=b"n" * 16), DeclineReason.DATA)
    head, transfer, note = received(parties, line, Decline)
    assert head == Sealed("reef", "decline", "dev-1", "aggregator")
    assert note == Decline("reef", "dev-1", RUN_ID, b"n" * 16, DeclineReason.DATA)
    assert (transfer.kind, transfer.round) == (ChunkKind.DECLINE, 4)


def test_reminder_repeats_what_upload_was(parties, line, notes):
    notes.remind(RUN_ID, 4, SealedMessage(bytes(5000), TRANSFER, DIGEST), 1024, 7)
    head, transfer, note = received(parties, line, Reminder)
    assert head == Sealed("reef", "reminder", "dev-1", "aggregator")
    assert note == Reminder(
        fleet="reef",
        device="dev-1",
        run_id=RUN_ID,
        round=4,
        transfer=TRANSFER,
        digest=DIGEST,
        size=5000,
        chunk_bytes=1024,
        turn=7,
    )
    assert (transfer.kind, transfer.round) == (ChunkKind.REMINDER, 4)


def test_another_device_can_not_open_or_send(parties, line, notes):
    """Another device can neither open nor have sent it."""
    notes.decline(announcement(), DeclineReason.TASK)
    with pytest.raises(SealError):
        received(parties, line, Decline, signer="dev-2")
    payload = Reassembler().add("dev-1", line.sent[0][1], 0.0).payload
    head, at = read_head(payload)
    key = parties.members["dev-1"].identity.member.sign_key
    with pytest.raises(SealError):
        open_from_member(parties.members["dev-2"].identity, payload, head, at, key)


def test_same_note_twice_is_two_transfers(line, notes):
    """The aggregator would take a copy of a chunk for a resent one."""
    for _ in range(2):
        notes.decline(announcement(), DeclineReason.DATA)
    first, second = (Reassembler().add("x", chunk, 0.0).transfer_id for _, chunk, _ in line.sent)
    assert first != second
