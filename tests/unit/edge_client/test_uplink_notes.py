"""Declines and reminders: sealed to the aggregator, signed by the device, on the device's own topic."""

import pytest

from crypto.seal.envelope import SealedMessage, SealError, open_from_member, read_head
from edge_client.uplink import ControlMessages
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import decode
from shoal.protocol.messages import Decline, DeclineReason, Reminder, Sealed
from shoal.protocol.reassembly import Reassembler
from tests.helpers.announced import announcement
from tests.helpers.parties import TOPICS, Parties

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
