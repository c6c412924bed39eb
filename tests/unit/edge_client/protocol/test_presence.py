"""A device's presence: its message, its repetition, and the key that it is sealed under."""

import dataclasses

import pytest

from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head
from edge_client.protocol.presence import PRESENCE_AGAIN_S, Attendance, presence, receiving_notice
from edge_client.protocol.session_io import OfferReceivingKeys, PublishPresence
from shoal.errors import WireError
from shoal.membership.grants import open_notice
from shoal.protocol.codec import decode
from shoal.protocol.messages import Presence, Sealed
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.states import TranscriptHead
from shoal.version import VERSION
from tests.helpers.parties import TOPICS
from tests.helpers.sessions import FACTS, GROUP, new_runtime

BIRTH = 1_795_000_000_000_000_000
BOTH = (PublishPresence(), OfferReceivingKeys())


def at(now_s, **changes):
    """Return the surroundings at a time."""
    return dataclasses.replace(FACTS, now_s=now_s, **changes)


@pytest.fixture
def member(parties):
    return parties.members["dev-1"]


def opened(member, chunk, group=None):
    """Return (head, Presence) of a chunk."""
    transfer = Reassembler().add("x", chunk, 0.0)
    head, at = read_head(transfer.payload)
    plain = open_from_group(group or member.group, transfer.payload, head, at, member.identity.member.sign_key)
    return head, decode(plain, Presence)


def said(member, line):
    """Return whether each presence that was published says online; all is retained at the device's own topics."""
    assert all(retain for _, _, retain in line.sent)
    assert {topic for topic, _, _ in line.sent} <= {TOPICS.state("dev-1"), TOPICS.receiving("dev-1")}
    return [opened(member, chunk)[1].online for topic, chunk, _ in line.sent if topic == TOPICS.state("dev-1")]


def offered(member, line):
    """Return the number of the first receiving key in each notice that was published."""
    found = []
    for topic, chunk, _ in line.sent:
        if topic == TOPICS.receiving("dev-1"):
            notice = open_notice(Reassembler().add("x", chunk, 0.0).payload, member.identity.member.sign_key)
            assert (notice.fleet, notice.device, notice.receiving) == ("reef", "dev-1", member.receiving.public)
            found.append(notice.receiving.first)
    return found


@pytest.mark.parametrize(
    ("online", "told"),
    [
        (True, {"head": TranscriptHead(bytes(16), 3, b"h" * 32)}),
        (False, {}),
        (True, {"left_out": 3, "rival": 7, "doubted": True}),
    ],
)
def test_presence_is_one_signed_chunk(member, online, told):
    """A presence is one signed chunk at the devices topic, which only the fleet can read."""
    topic, chunk = presence(member, BIRTH, online=online, at_s=1790000000.9, **told)
    assert topic == TOPICS.state("dev-1")
    expected = Presence("reef", "dev-1", BIRTH, online, VERSION, 1790000000, **told)
    assert opened(member, chunk) == (Sealed("reef", "presence", "dev-1", "*"), expected)
    with pytest.raises(SealError):
        opened(member, chunk, GroupKey("reef", "broadcast", bytes(32)))


@pytest.mark.parametrize(("jitter", "after_s"), [(0.0, 0.5 * PRESENCE_AGAIN_S), (0.5, 0.75 * PRESENCE_AGAIN_S)])
def test_presence_is_repeated_once(jitter, after_s):
    """A presence is repeated once after a random time."""
    assert Attendance(GROUP).ticked(at(1e9))[1] == (), "nothing is due before the first connection"
    attending, done = Attendance(GROUP).connected(at(10.0, jitter=jitter))
    assert done == BOTH
    assert attending.ticked(at(10.0 + after_s - 0.01)) == (attending, ())
    attending, done = attending.ticked(at(10.0 + after_s))
    assert done == BOTH
    assert attending.ticked(at(1e9))[1] == ()


def test_receiving_keys_are_the_next_ones(parties, member, line):
    """The receiving keys are those for the next delivery."""
    parties.owner.rotate()
    member.take_grant(parties.grant("dev-1"))
    line.publish(*receiving_notice(member), retain=True)
    assert offered(member, line) == [3]


def test_second_connection_defers_it():
    """A second connection puts the repetition off."""
    attending, _ = Attendance(GROUP).connected(at(10.0))
    attending, _ = attending.connected(at(11.0))
    assert attending.ticked(at(10.0 + 0.5 * PRESENCE_AGAIN_S))[1] == ()
    assert attending.ticked(at(11.0 + 0.5 * PRESENCE_AGAIN_S))[1] == BOTH


def test_stale_once_the_key_has_changed(parties, member, line):
    """A presence is stale once the broadcast key has changed."""
    runtime = new_runtime(member, line)
    assert not runtime.session.presence.is_stale(runtime._facts())
    old = member.group
    parties.owner.rotate()
    member.take_grant(parties.grant("dev-1"))
    assert not runtime.session.presence.is_stale(runtime._facts()), "the newer keys are not in use yet"
    member.promote(member.next)
    assert runtime.session.presence.is_stale(runtime._facts())
    line.publish(*presence(member, BIRTH, online=True), retain=True)
    runtime._go_on(runtime.session.group_followed(runtime._facts()))
    assert not runtime.session.presence.is_stale(runtime._facts())
    assert said(member, line) == [True, True]
    with pytest.raises(SealError):
        opened(member, line.sent[-1][1], old)


def test_a_device_that_leaves_says_so(member, line):
    """A closed transport does not keep a device from leaving."""
    new_runtime(member, line).close()
    assert said(member, line) == [False]

    def refuse(*_, **__):
        raise WireError("the transport is closed")

    line.publish, line.closed = refuse, False
    new_runtime(member, line).close()
    assert line.closed
