"""Who is there: a device's word under the secrets in force or the next, and a will that was sealed under older ones."""

import dataclasses

import pytest

from aggregator.device_presence import DevicePresence
from aggregator.rounds.events import CameOnline, WentOffline
from crypto.seal.envelope import GroupKey, SealError, seal_to_group
from crypto.seal.identity import Identity
from edge_client.protocol.presence import presence
from shoal.errors import UntrustedError
from shoal.protocol.chunking import Fingerprint
from shoal.protocol.codec import encode
from shoal.protocol.messages import Presence, Sealed
from shoal.protocol.reassembly import Reassembler, Transfer
from tests.helpers.crews import Crew


@pytest.fixture
def crew(tmp_path):
    return Crew(tmp_path)


def said(member, birth, *, online):
    """Return the transfer of a device's presence."""
    _, chunk = presence(member, birth, online=online)
    return Reassembler().add("x", chunk, 0.0)


def forged(crew, device="dev-1", *, key=None, signer=None, purpose="presence", sender=None, online=False):
    """Return a presence with one thing wrong, under a key that the aggregator does not hold unless it is given."""
    member = crew.members[device]
    group = GroupKey("demo", "broadcast", key or bytes(32))
    head = Sealed("demo", purpose, sender or device, "*")
    message = encode(Presence("demo", device, 9, online))
    payload = memoryview(seal_to_group(signer or member.identity, group, head, message))
    found = Fingerprint.of(payload)
    return Transfer(source="x", kind=None, round=0, transfer_id=found.transfer_id, payload=payload, signed=found.signed)


def test_a_device_comes_and_goes(crew):
    here, member = DevicePresence(crew.server), crew.members["dev-1"]
    assert here.take("dev-1", said(member, 5, online=True)) == CameOnline("dev-1")
    assert here.take("dev-1", said(member, 5, online=False)) == WentOffline("dev-1")


def test_the_will_of_an_earlier_life_says_nothing(crew):
    here, member = DevicePresence(crew.server), crew.members["dev-1"]
    here.take("dev-1", said(member, 5, online=True))
    assert here.take("dev-1", said(member, 4, online=False)) is None
    assert here.take("dev-1", said(member, 6, online=True)) == CameOnline("dev-1")


def test_both_generations_are_read_while_the_fleet_goes_over(crew):
    here, member = DevicePresence(crew.server), crew.members["dev-1"]
    old = said(member, 5, online=True)
    crew.rotate("dev-1")
    crew.server.take_grant((crew.owner.path / "grants" / "aggregator.grant").read_bytes())
    member.promote(member.later[0])
    assert here.take("dev-1", old) == CameOnline("dev-1")
    assert here.take("dev-1", said(member, 6, online=True)) == CameOnline("dev-1")


@pytest.mark.parametrize("online", [False, True], ids=["its will", "its word"])
def test_whoever_speaks_under_replaced_secrets_is_not_there(crew, online):
    """The will of a connection from before, which nobody can change; or a device that has not got the newer secrets."""
    here, member = DevicePresence(crew.server), crew.members["dev-1"]
    last = said(member, 5, online=online)
    crew.owner.rotate()
    crew.server.take_grant((crew.owner.path / "grants" / "aggregator.grant").read_bytes())
    crew.server.promote(crew.server.later[0])
    assert here.take("dev-1", last) == WentOffline("dev-1")


@pytest.mark.parametrize(
    "changes",
    [
        {"signer": Identity.generate("dev-1")},
        {"purpose": "announcement"},
        {"sender": "dev-2"},
    ],
    ids=["signed by a stranger", "not a presence", "another's"],
)
def test_nobody_sends_a_device_away_for_it(crew, changes):
    with pytest.raises(SealError):
        DevicePresence(crew.server).take("dev-1", forged(crew, **changes))


def test_the_forgeries_above_are_good_but_for_one_thing(crew):
    assert DevicePresence(crew.server).take("dev-1", forged(crew)) == WentOffline("dev-1")


def test_a_presence_of_another_device_is_refused(crew):
    """Under the right key and signed by the device whose topic it lies on."""
    member = crew.members["dev-1"]
    message = encode(Presence("demo", "dev-2", 9, online=False))
    payload = memoryview(
        seal_to_group(member.identity, member.group, Sealed("demo", "presence", "dev-1", "*"), message)
    )
    found = Fingerprint.of(payload)
    with pytest.raises(UntrustedError, match="the presence of 'dev-2' on dev-1's topic"):
        DevicePresence(crew.server).take(
            "dev-1",
            Transfer(
                source="x", kind=None, round=0, transfer_id=found.transfer_id, payload=payload, signed=found.signed
            ),
        )


def test_somebody_who_was_revoked_is_not_listened_to(crew):
    member = crew.members["dev-1"]
    word = said(member, 5, online=True)
    crew.server.roster = dataclasses.replace(crew.server.roster, revoked=("dev-1",))
    with pytest.raises(UntrustedError, match="dev-1 is not in the roster"):
        DevicePresence(crew.server).take("dev-1", word)
