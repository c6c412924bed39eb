"""Who is there: a device's word under the secrets in force or the next, and a will that was sealed under older ones."""

import dataclasses

import pytest

from aggregator.inbound import DevicePresence, PresenceInbox
from aggregator.rounds.state import CameOnline, WentOffline
from aggregator.status.watch import FleetWatch
from crypto.seal.envelope import GroupKey, SealError, seal_to_group
from crypto.seal.identity import Identity
from edge_client.protocol.presence import presence
from shoal.errors import ShoalError, UntrustedError
from shoal.protocol.chunking import Fingerprint
from shoal.protocol.codec import encode
from shoal.protocol.messages import Presence, Sealed
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Message
from shoal.version import VERSION, WIRE
from tests.helpers.parties import TOPICS, Line, Parties


@pytest.fixture
def parties(tmp_path):
    return Parties(tmp_path, "dev-1", "dev-2")


def said(member, birth, *, online):
    """Return the transfer of a device's presence."""
    _, chunk = presence(member, birth, online=online)
    return Reassembler().add("x", chunk, 0.0)


def forged(parties, device="dev-1", *, group=None, signer=None, purpose="presence", sender=None, **message):
    """Return a presence with one thing wrong, under a key that the aggregator does not hold unless it is given."""
    member = parties.members[device]
    head = Sealed("reef", purpose, sender or device, "*")
    plain = encode(Presence(**{"fleet": "reef", "device": device, "birth": 9, "online": False, **message}))
    unknown = GroupKey("reef", "broadcast", bytes(32))
    payload = memoryview(seal_to_group(signer or member.identity, group or unknown, head, plain))
    found = Fingerprint.of(payload)
    return Transfer(source="x", kind=None, round=0, transfer_id=found.transfer_id, payload=payload, signed=found.signed)


def go_over(parties):
    """Let the aggregator promote the secrets of a new key version."""
    parties.owner.rotate()
    parties.server.take_grant(parties.grant())
    parties.server.promote(parties.server.later[0])


def test_a_device_comes_and_goes(parties):
    """The will of an earlier life says nothing; what is checked is recorded for `status`."""
    watch = FleetWatch()
    here, member = DevicePresence(parties.server, watch), parties.members["dev-1"]
    assert here.take("dev-1", said(member, 5, online=True)) == CameOnline("dev-1")
    assert here.take("dev-1", said(member, 4, online=False)) is None
    assert watch.devices.devices["dev-1"].online is True
    assert watch.devices.devices["dev-1"].version == VERSION
    assert here.take("dev-1", said(member, 5, online=False)) == WentOffline("dev-1")
    assert watch.devices.devices["dev-1"].online is False
    assert here.take("dev-1", said(member, 6, online=True)) == CameOnline("dev-1")


@pytest.mark.parametrize(("wire", "event"), [(None, CameOnline), (WIRE, CameOnline), (WIRE + 1, WentOffline)])
def test_other_wire_version_is_offline(parties, wire, event):
    """A device that does not speak the runs wire version counts as offline."""
    watch = FleetWatch()
    here = DevicePresence(parties.server, watch, wire)
    assert here.take("dev-1", said(parties.members["dev-1"], 5, online=True)) == event("dev-1")
    found = watch.devices.devices["dev-1"]
    assert (found.online, found.version, found.wire) == (True, VERSION, WIRE), "status tells why"


def test_later_fields_are_skipped(parties):
    """Later fields of a presence are skipped."""
    word = forged(parties, group=parties.members["dev-1"].group, online=True, later=((40, b"new"),))
    assert DevicePresence(parties.server, None, WIRE).take("dev-1", word) == CameOnline("dev-1")


def test_both_generations_are_read(parties):
    """Both generations are read while the fleet goes over."""
    here, member = DevicePresence(parties.server), parties.members["dev-1"]
    old = said(member, 5, online=True)
    parties.owner.rotate()
    member.take_grant(parties.grant("dev-1"))
    parties.server.take_grant(parties.grant())
    member.promote(member.later[0])
    assert here.take("dev-1", old) == CameOnline("dev-1")
    assert here.take("dev-1", said(member, 6, online=True)) == CameOnline("dev-1")


@pytest.mark.parametrize("online", [False, True], ids=["its will", "its word"])
def test_replaced_secrets_mean_absence(parties, online):
    """The will of a connection from before, which nobody can change; or a device that has not got the newer secrets."""
    watch = FleetWatch()
    here, last = DevicePresence(parties.server, watch), said(parties.members["dev-1"], 5, online=online)
    go_over(parties)
    assert here.take("dev-1", last) == WentOffline("dev-1")
    assert watch.devices.devices["dev-1"].online is False


@pytest.mark.parametrize(
    "changes",
    [
        {"signer": Identity.generate("dev-1")},
        {"purpose": "announcement"},
        {"sender": "dev-2"},
    ],
    ids=["signed by a stranger", "not a presence", "another's"],
)
def test_nobody_sends_a_device_away_for_it(parties, changes):
    with pytest.raises(SealError):
        DevicePresence(parties.server).take("dev-1", forged(parties, **changes))


def test_forgeries_differ_in_one_thing(parties):
    """The forgeries above are good but for one thing."""
    assert DevicePresence(parties.server).take("dev-1", forged(parties)) == WentOffline("dev-1")


def test_presence_of_another_is_refused(parties):
    """Under the right key and signed by the device whose topic it lies on."""
    member = parties.members["dev-1"]
    word = forged(parties, "dev-2", group=member.group, signer=member.identity, sender="dev-1")
    with pytest.raises(UntrustedError, match="a presence of 'dev-2' of 'reef'"):
        DevicePresence(parties.server).take("dev-1", word)


def test_revoked_device_is_not_heard(parties):
    """Somebody who was revoked is not listened to."""
    word = said(parties.members["dev-1"], 5, online=True)
    parties.server.roster = dataclasses.replace(parties.server.roster, revoked=("dev-1",))
    with pytest.raises(UntrustedError, match="dev-1 is not in the roster"):
        DevicePresence(parties.server).take("dev-1", word)


# ------------------------------------------------------------------------------------------------------- for `status`


def test_presences_are_read_without_a_run(parties):
    """Presences are read while no run is served."""
    line, watch = Line(), FleetWatch()
    inbox = PresenceInbox(parties.server, watch)
    inbox.subscribe(line)
    assert line.filters == [TOPICS.filter(TopicKind.STATE)]
    topic, chunk = presence(parties.members["dev-1"], 5, online=True)
    for message in (
        Message(topic, chunk, retained=True),
        Message(topic, b""),
        Message(TOPICS.up("dev-1"), chunk),
        Message(TOPICS.state("stranger"), chunk),
    ):
        inbox.take(message, 0.0)
    (facts,) = watch.devices.devices.values()
    assert (facts.online, facts.last_seen_s) == (True, None)
    with pytest.raises(ShoalError):
        inbox.take(Message(TOPICS.state("dev-2"), chunk), 0.0)
    assert list(watch.devices.devices) == ["dev-1"]
