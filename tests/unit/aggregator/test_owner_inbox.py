"""The owner's messages to the running aggregator: newer rosters, newer keys, and forgeries of both."""

import dataclasses

import pytest

from aggregator.owner_inbox import OwnerInbox
from crypto.seal.envelope import SealError
from crypto.seal.identity import Identity, sign_document
from shoal.errors import UntrustedError, WireError
from shoal.membership.roster import RosterForkError
from shoal.membership.roster_changes import ReplacedError
from shoal.protocol.channels import KEYS
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind
from tests.helpers.parties import TOPICS, Line, Parties, owners_roster

ROSTER, OWN_KEYS = TOPICS.at(TopicKind.OWNER_ROSTER), TOPICS.keys("aggregator")


@pytest.fixture
def inbox(parties):
    return OwnerInbox(parties.server)


def keys(parties, name="aggregator"):
    (chunk,) = split(parties.grant(name), kind=KEYS.kind, round=0)
    return chunk


def test_listens_to_the_owner_and_own_keys(inbox):
    """It listens to the owners rosters and to its own keys alone, and leaves messages of others to the caller."""
    line = Line()
    inbox.subscribe(line)
    assert line.filters == [f"{ROSTER}/#", f"{OWN_KEYS}/#"]
    taken = [inbox.take(topic, b"anything", 0.0) for topic in (TOPICS.up("dev-1"), TOPICS.state("dev-1"), TOPICS.round)]
    assert taken == [False] * 3


def test_newer_roster_is_adopted_once(parties, inbox, caplog):
    """A newer roster is adopted and logged once."""
    caplog.set_level("INFO")
    parties.owner.renew()
    for _ in range(2):
        assert inbox.take(ROSTER, owners_roster(parties), 0.0)
    assert parties.server.roster == parties.owner.roster
    assert [r.message for r in caplog.records] == ["new roster from the owner"]


def test_newer_keys_wait_for_the_next_run(parties, inbox, caplog):
    """Newer keys wait for the next run and are logged once."""
    caplog.set_level("INFO")
    before = parties.server.grant
    parties.owner.rotate()
    for _ in range(2):
        assert inbox.take(OWN_KEYS, keys(parties), 0.0)
    assert parties.server.next.broadcast_key == parties.owner.secrets.broadcast_key
    assert parties.server.grant == before
    assert [r.message for r in caplog.records] == ["newer keys"]


def test_a_cleared_message_changes_nothing(parties, inbox):
    before = parties.server.roster_bytes
    assert inbox.take(ROSTER, b"", 0.0)
    assert inbox.take(OWN_KEYS, b"", 0.0)
    assert parties.server.roster_bytes == before


def test_roster_in_pieces_is_adopted_whole(parties, inbox):
    """A roster in pieces is adopted when all are there."""
    roster = dataclasses.replace(parties.owner.roster, sequence=99, revoked=tuple(f"gone-{i:02}" for i in range(200)))
    signed = sign_document(parties.owner.owner, roster)
    whole = Reassembler().add("x", owners_roster(parties, signed), 0.0).payload
    *pieces, last = split(bytes(whole), kind=ChunkKind.ROSTER, round=0, chunk_bytes=1024)
    assert pieces
    for piece in pieces:
        assert inbox.take(ROSTER, piece, 0.0)
    assert parties.server.roster_bytes != signed
    inbox.take(ROSTER, last, 0.0)
    assert parties.server.roster_bytes == signed


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"fleet": "atoll"}, "of 'owner' where the owner's roster belongs$"),
        ({"sender": "dev-1"}, "of 'dev-1' where the owner's roster belongs$"),
        ({"purpose": "grant/aggregator"}, "^a grant/aggregator of 'owner' where the owner's roster belongs$"),
        ({"purpose": "roster-change"}, "where the owner's roster belongs$"),
        ({"signer": Identity.generate("owner")}, "^a sealed message was refused$"),
        ({"to": Identity.generate("aggregator").member}, "^roster 4 does not name this aggregator"),
    ],
    ids=["fleet", "sender", "purpose", "longer purpose", "signer", "recipient"],
)
def test_foreign_roster_is_refused(parties, inbox, changes, error):
    """A roster that is not the owners to us is refused."""
    before = parties.server.roster
    parties.owner.renew()
    with pytest.raises(UntrustedError, match=error):
        inbox.take(ROSTER, owners_roster(parties, **changes), 0.0)
    assert parties.server.roster == before


@pytest.mark.parametrize("change", ["older", "another signer"])
def test_owners_newer_roster_alone_ends_us(parties, inbox, change):
    """The broker may still have the roster that was sealed to the aggregator before us; a stranger has no owner's key."""
    changes = {"to": Identity.generate("aggregator").member}
    if change == "another signer":
        parties.owner.renew()
        changes["signer"] = Identity.generate("owner")
    with pytest.raises(UntrustedError, match="a sealed message was refused") as caught:
        inbox.take(ROSTER, owners_roster(parties, **changes), 0.0)
    assert not isinstance(caught.value, ReplacedError)


def test_false_signature_inside_is_refused(parties, inbox):
    """The envelope is the owner's, the roster in it is not."""
    roster = dataclasses.replace(parties.owner.roster, sequence=99)
    with pytest.raises(UntrustedError, match=r"not by|signature"):
        inbox.take(ROSTER, owners_roster(parties, sign_document(Identity.generate("owner"), roster)), 0.0)


def test_a_rolled_back_roster_is_refused(parties, inbox):
    old = owners_roster(parties)
    parties.owner.renew()
    inbox.take(ROSTER, owners_roster(parties), 0.0)
    with pytest.raises(UntrustedError, match="refused as a rollback"):
        inbox.take(ROSTER, old, 0.0)
    assert parties.server.roster == parties.owner.roster


def test_each_fork_is_logged_once(parties, inbox, caplog):
    """Each fork is refused every time and logged as an error once."""
    roster = parties.owner.roster
    forks = [sign_document(parties.owner.owner, dataclasses.replace(roster, revoked=(n,))) for n in ("dev-1", "dev-2")]
    for fork in (*forks, *forks):
        with pytest.raises(RosterForkError):
            inbox.take(ROSTER, owners_roster(parties, fork), 0.0)
    errors = [r for r in caplog.records if r.levelname == "ERROR"]
    assert [r.message for r in errors] == ["two rosters of one sequence"] * 2
    assert parties.server.roster == roster


def test_foreign_topic_is_refused_unread(parties, inbox):
    """Keys on another partys topic are refused before they are read."""
    with pytest.raises(UntrustedError, match=r"^keys for 'dev-1', which aggregator has not subscribed to$"):
        inbox.take(TOPICS.keys("dev-1"), b"junk", 0.0)


def test_keys_for_a_device_are_refused(parties, inbox):
    """Keys that are sealed to a device are refused."""
    parties.owner.rotate()
    with pytest.raises(UntrustedError):
        inbox.take(OWN_KEYS, keys(parties, "dev-1"), 0.0)
    assert parties.server.next is None


@pytest.mark.parametrize(
    "chunk",
    [b"junk", split(b"x" * 100, kind=ChunkKind.UPLOAD, round=0)[0], split(b"x" * 100, kind=KEYS.kind, round=0)[0]],
)
def test_malformed_messages_are_wire_errors(inbox, chunk):
    with pytest.raises(WireError):
        inbox.take(ROSTER, chunk, 0.0)


def test_other_owners_roster_is_no_seal(parties, inbox, tmp_path):
    """The roster of an owner that we did not join is no seal of ours."""
    other = Parties(tmp_path / "other", "dev-1")
    with pytest.raises(SealError):
        inbox.take(ROSTER, owners_roster(other, to=parties.server.identity.member), 0.0)
