"""The aggregator's membership: runs that it may serve with its roster and keys, and messages that it opens."""

import dataclasses
import time

import pytest

from aggregator import membership as aggregators
from crypto.seal.envelope import GroupKey, SealError, seal_to_group
from crypto.seal.identity import Identity, fingerprint, sign_document
from edge_client.protocol.presence import presence
from shoal.errors import ConfigError, NotEnrolledError, UntrustedError
from shoal.membership.directory import ROSTER_FILE
from shoal.protocol.chunking import Fingerprint
from shoal.protocol.messages import Sealed
from shoal.protocol.reassembly import Reassembler
from shoal.util.files import write_private
from tests.helpers.parties import Parties
from tests.helpers.plans import run_plan


@pytest.fixture
def parties(tmp_path):
    return Parties(tmp_path, "dev-1", "dev-2")


@pytest.fixture
def fleet(parties):
    return parties.owner


@pytest.fixture
def server(parties):
    return parties.server


def signed_now(fleet, run=1):
    return run_plan(run=run, roster_sequence=fleet.roster.sequence)


def keys(fleet):
    return (fleet.path / "grants" / "aggregator.grant").read_bytes()


def test_run_under_newer_roster_waits_for_it(fleet, server):
    assert server.reason(signed_now(fleet)) == ""
    fleet.renew()
    run = signed_now(fleet)
    assert "signed under roster" in server.reason(run)
    server.adopt(fleet.roster_bytes)
    assert server.reason(run) == ""


def test_run_waits_for_its_newer_keys(fleet, server):
    """This holds if the roster arrives first, too. A run of before is served with the keys of before if it begins first."""
    old = signed_now(fleet)
    before = server.grant.broadcast_key
    fleet.revoke("dev-2")
    new = signed_now(fleet, run=2)
    server.adopt(fleet.roster_bytes)
    assert "newer keys" in server.reason(new)
    server.take_grant(keys(fleet))
    assert server.reason(old) == ""
    assert server.grant.broadcast_key == before
    assert server.reason(new) == ""
    assert server.grant.broadcast_key == fleet.secrets.broadcast_key != before
    assert server.group.secret == fleet.secrets.broadcast_key
    assert before not in b"".join(p.read_bytes() for p in server.directory.iterdir() if p.is_file())
    with pytest.raises(UntrustedError, match="replaced since"):
        server.reason(old)


def test_keys_name_their_roster(fleet, server):
    """It arrives in a message of its own, and no round opens under the older secrets until it has."""
    before = server.roster
    fleet.revoke("dev-2")
    server.take_grant(keys(fleet))
    assert server.roster == before
    assert server.keys_since == fleet.roster.keys_since > before.keys_since
    assert aggregators.AggregatorMembership(server.directory).next == server.next


def test_keys_for_device_are_not_aggregators(fleet, server):
    fleet.revoke("dev-2")
    with pytest.raises(UntrustedError):
        server.take_grant((fleet.path / "grants" / "dev-1.grant").read_bytes())
    assert server.next is None


def test_no_grant_no_fleet(tmp_path):
    """A directory without a grant belongs to no fleet."""
    with pytest.raises(NotEnrolledError, match="belongs to no fleet"):
        aggregators.AggregatorMembership(tmp_path)


def test_init_never_overwrites_keys(tmp_path):
    """Init makes the directory of runs and keys that are never overwritten."""
    assert aggregators.init(tmp_path / "a", "harbour").name == "harbour.card"
    assert (tmp_path / "a" / aggregators.RUNS_DIRECTORY).is_dir()
    with pytest.raises(ConfigError, match="holds keys already"):
        aggregators.init(tmp_path / "a", "harbour")


def test_another_aggregators_roster(fleet, server):
    """Signed by the owner: the fleet has taken another aggregator in."""
    other = Identity.generate("aggregator").member
    roster = dataclasses.replace(fleet.roster, sequence=fleet.roster.sequence + 1, aggregator=other)
    write_private(server.directory / ROSTER_FILE, sign_document(fleet.owner, roster))
    with pytest.raises(UntrustedError, match=f"does not name this aggregator .{fingerprint(server.identity.member)}"):
        aggregators.AggregatorMembership(server.directory)


def test_keys_newer_than_the_plan(parties, server):
    """A run may have come to keys that are newer than its plan."""
    run = signed_now(parties.owner)
    parties.owner.rotate()
    server.take_grant(parties.grant())
    server.adopt(parties.owner.roster_bytes)
    newest = parties.owner.roster.keys_since
    server.promote(server.next)
    assert server.reason(run, key_version=newest) == ""
    for earlier in (None, newest - 1):
        with pytest.raises(UntrustedError, match=r"^run 1 was made with keys that have been replaced since$") as caught:
            server.reason(run, key_version=earlier)
        assert "shoal-fleet run start" in caught.value.hint


# ------------------------------------------------------------------------------------------- messages of devices


def said(member):
    """Return the envelope of a device's presence, and its digest."""
    transfer = Reassembler().add("x", presence(member, 1, online=True)[1], 0.0)
    return transfer.payload, transfer.signed


def test_presence_opens_under_later_keys(parties, server, monkeypatch):
    """A presence, which has the time in seconds, is opened under keys in force and under later ones."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    member = parties.members["dev-1"]
    old = said(member)
    parties.owner.rotate()
    for party, name in ((server, "aggregator"), (member, "dev-1")):
        party.take_grant(parties.grant(name))
    member.promote(member.next)
    new = said(member)
    plain = {bytes(server.open_from_device(member.identity.member, *each)) for each in (old, new)}
    assert len(plain) == 1
    server.promote(server.next)
    server.open_from_device(member.identity.member, *new)
    with pytest.raises(SealError):
        server.open_from_device(member.identity.member, *old)


def test_message_of_another_signer(parties, server):
    """A message that another device signed is refused."""
    with pytest.raises(SealError):
        server.open_from_device(parties.members["dev-2"].identity.member, *said(parties.members["dev-1"]))


def test_unknown_key_but_known_signature(parties, server):
    """A presence is recognised by its signature though its key is unknown."""
    member = parties.members["dev-1"]
    unknown = GroupKey("reef", "broadcast", bytes(32))

    def sealed(fleet="reef", purpose="presence", sender="dev-1", signer=member.identity):
        payload = memoryview(seal_to_group(signer, unknown, Sealed(fleet, purpose, sender, "*"), b"x"))
        return payload, Fingerprint.of(payload).signed

    ours = member.identity.member
    assert server.is_presence_of(ours, *sealed())
    for wrong in (
        {"fleet": "atoll"},
        {"purpose": "control"},
        {"sender": "dev-2"},
        {"signer": parties.members["dev-2"].identity},
    ):
        assert not server.is_presence_of(ours, *sealed(**wrong)), wrong
