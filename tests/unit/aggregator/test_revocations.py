"""Revoked devices that still send: they get the owner's roster, at growing pauses, and no stranger gets any."""

from types import SimpleNamespace

import pytest

from aggregator.publisher import FIRST_PAUSE_S, MAX_PAUSE_S, Revocations
from crypto.seal.envelope import GroupKey, seal_to_group
from crypto.seal.identity import Identity
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.messages import Sealed

DEVICES = {name: Identity.generate(name) for name in ("gone", "here", "late")}
REVOKED = ("gone", "unlisted")
ROSTER = SimpleNamespace(
    devices=tuple(i.member for i in DEVICES.values()),
    revoked=REVOKED,
    sequence=8,
    device=lambda name: DEVICES[name].member if name in DEVICES and name not in REVOKED else None,
)


class Publisher:
    """Records the rosters sent."""

    def __init__(self):
        self.sent = []

    def revoked(self, member, signed):
        """Record a roster."""
        self.sent.append((member.name, signed))


@pytest.fixture
def publisher():
    return Publisher()


@pytest.fixture
def revocations(publisher):
    membership = SimpleNamespace(fleet="reef", roster=ROSTER, roster_bytes=b"signed by the owner")
    return Revocations(membership, publisher)


def message(device="gone", *, signer=None, fleet="reef", sender=None, body=10, chunks=1):
    """Return the first chunk of a message sealed under a key that the aggregator does not have."""
    group = GroupKey("reef", "broadcast", bytes(32))
    head = Sealed(fleet, "presence", sender or device, "*")
    sealed = seal_to_group(signer or DEVICES[device], group, head, bytes(body))
    size = {} if chunks == 1 else {"chunk_bytes": -(-len(sealed) // chunks)}
    pieces = split(sealed, kind=ChunkKind.STATE, round=0, **size)
    assert len(pieces) == chunks
    return pieces[0]


def test_revoked_device_is_sent_the_roster(revocations, publisher, caplog):
    """A revoked device is sent the roster though its message can't be opened."""
    caplog.set_level("INFO")
    revocations.look("gone", message(), 0.0)
    assert publisher.sent == [("gone", b"signed by the owner")]
    (record,) = caplog.records
    assert record.kv == {"device": "gone", "roster": 8}


def altered(chunk):
    """Return the chunk with another last byte."""
    return chunk[:-1] + bytes([chunk[-1] ^ 1])


@pytest.mark.parametrize(
    "chunk",
    [
        message(signer=DEVICES["here"]),
        message(fleet="atoll"),
        message("here"),
        message(sender="here"),
        altered(message()),
        b"junk",
        b"",
    ],
    ids=["another signer", "another fleet", "another device's", "another sender", "altered", "junk", "empty"],
)
def test_unsigned_message_starts_no_pause(revocations, publisher, chunk):
    """Anybody can publish on its topic: a forgery must not delay the answer to its own message."""
    revocations.look("gone", chunk, 0.0)
    assert publisher.sent == []
    revocations.look("gone", message(), 0.0)
    assert len(publisher.sent) == 1


@pytest.mark.parametrize(
    ("device", "chunk"),
    [("gone", message(body=4096, chunks=2)), ("unlisted", message())],
    ids=["several chunks, which are followed by reminders", "a revoked name without a key to seal to"],
)
def test_messages_that_get_no_answer(revocations, publisher, device, chunk):
    revocations.look(device, chunk, 0.0)
    assert publisher.sent == []


def test_list_is_not_searched_for_active(revocations, publisher, monkeypatch):
    """It may hold thousands of names, and every message of every device comes through here."""
    monkeypatch.setattr(ROSTER, "revoked", None)
    revocations.look("here", message("here"), 0.0)
    assert publisher.sent == []


def test_pauses_double_up_to_the_longest(revocations, publisher):
    now_s, pauses = 100.0, []
    revocations.look("gone", message(), now_s)
    for _ in range(9):
        pause_s = 0.0
        sent = len(publisher.sent)
        while len(publisher.sent) == sent:
            pause_s += FIRST_PAUSE_S
            revocations.look("gone", message(), now_s + pause_s)
        now_s += pause_s
        pauses.append(pause_s)
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]


def test_each_device_has_pauses_of_its_own(publisher):
    roster = SimpleNamespace(devices=ROSTER.devices, revoked=("gone", "late"), sequence=8, device=lambda _name: None)
    revocations = Revocations(SimpleNamespace(fleet="reef", roster=roster, roster_bytes=b"r"), publisher)
    for device in ("gone", "late", "gone", "late"):
        revocations.look(device, message(device), 0.5)
    assert [device for device, _ in publisher.sent] == ["gone", "late"]
