"""A device's membership: its place in the roster, its keys of each version, and the aggregator's messages to it."""

import dataclasses
import shutil

import pytest

from crypto.seal.envelope import GroupKey, SealError, seal_to_group, seal_to_member
from crypto.seal.identity import Identity, sign_document
from edge_client.membership import EARLIER_FILE, MOST_EARLIER, REVOKED_HINT, DeviceMembership, init
from shoal.errors import ConfigError, IntegrityError, NotEnrolledError, UntrustedError
from shoal.membership.directory import ROSTER_FILE
from shoal.protocol import channels
from shoal.protocol.chunking import Fingerprint
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPackage
from shoal.util.files import remove_unfinished, write_private
from tests.helpers.parties import Parties
from tests.helpers.plans import run_plan
from tests.helpers.power_cuts import cut_at


@pytest.fixture
def parties(tmp_path):
    return Parties(tmp_path, "dev-1", "dev-2")


@pytest.fixture
def member(parties):
    return parties.members["dev-2"]


def rotate(parties, *names):
    """Let the owner draw new keys, and the named parties take them; return the key version."""
    parties.owner.rotate()
    for name in names:
        party = parties.server if name == "aggregator" else parties.members[name]
        assert party.take_grant(parties.grant(name))
    return parties.owner.roster.keys_since


def reopened(member):
    return DeviceMembership(member.directory)


# --------------------------------------------------------------------------------------------------- in the roster


def test_device_knows_its_place_in_roster(parties, member):
    assert [parties.members[d].index for d in ("dev-1", "dev-2")] == [0, 1]
    assert member.listed
    assert (member.name, member.fleet) == ("dev-2", "reef")


@pytest.mark.parametrize("how", ["revoked", "other keys", "left out"])
def test_former_member_has_no_place(member, how):
    """A device that is no member any more has no place."""
    roster = member.roster
    other = Identity.generate("dev-2").member
    member.roster = {
        "revoked": dataclasses.replace(roster, revoked=("dev-2",)),
        "other keys": dataclasses.replace(roster, devices=(roster.devices[0], other)),
        "left out": dataclasses.replace(roster, devices=roster.devices[:1]),
    }[how]
    assert not member.listed
    with pytest.raises(UntrustedError, match=r"^dev-2 is not in the fleet's roster any more$") as caught:
        _ = member.index
    assert caught.value.hint == REVOKED_HINT


def test_expired_roster_starts_all_the_same(parties, member):
    """A device with an expired roster starts so that it can get a newer one."""
    roster = dataclasses.replace(member.roster, sequence=member.roster.sequence + 1, issued_at_s=1, expires_at_s=2)
    write_private(member.directory / ROSTER_FILE, sign_document(parties.owner.owner, roster))
    assert reopened(member).expired
    assert not member.expired


def test_no_grant_no_fleet(tmp_path):
    """A directory without a grant belongs to no fleet."""
    init(tmp_path / "new", "dev-9")
    with pytest.raises(NotEnrolledError, match="belongs to no fleet"):
        DeviceMembership(tmp_path / "new")
    with pytest.raises(ConfigError, match="holds keys already"):
        init(tmp_path / "new", "dev-9")


def test_keys_of_each_version_are_at_hand(parties, member):
    """The keys of each version that has arrived are at hand, and are the owner's."""
    old = member.grant
    new = rotate(parties, "dev-2")
    owners = parties.owner.version_key.reveal()
    assert member.grant_of(old.keys_since) == old
    assert member.grant_of(new).version_secret == owners != old.version_secret
    key = member.version_key(new)
    assert (key.fleet, key.number, key.next_run) == ("reef", new, 1)
    assert key.reveal() == owners != member.version_key(old.keys_since).reveal()
    for keys_of in (member.grant_of, member.version_key):
        with pytest.raises(NotEnrolledError, match=r"^no keys of roster 99 have come yet$") as caught:
            keys_of(99)
        assert "shoal-fleet publish" in caught.value.hint


# ------------------------------------------------------------------------------------------------ keys by version


# ------------------------------------------------------------------------------------- secrets of the key versions


def begun(member, generation, run):
    """Begin a run as a device does, without its chain; return the stepped version key."""
    key = member.version_key(generation)
    key.skip_to_run(run)
    key.begin_run(b"run")
    member.keep_version(key)
    return key


def on_disk(directory):
    return b"".join(p.read_bytes() for p in directory.iterdir() if p.is_file())


def test_stepped_key_erases_its_secret(member):
    """A stepped version key is stored and the secret before it erased; the key of before changes nothing."""
    generation = member.grant.keys_since
    early = member.version_key(generation)
    key = begun(member, generation, 3)
    for each in (member, reopened(member)):
        assert (each.version_key(generation).next_run, each.version_key(generation).reveal()) == (4, key.reveal())
    assert early.reveal() not in on_disk(member.directory)
    assert key.reveal() in on_disk(member.directory)
    before = member.grant
    member.keep_version(early)
    assert member.grant is before
    assert reopened(member).grant == before


def test_stepped_key_of_a_waiting_version(parties, member):
    """A newer one goes on waiting."""
    versions = [member.grant.keys_since, *(rotate(parties, "dev-2") for _ in range(3))]
    secrets = [member.version_key(number).reveal() for number in versions]
    key = begun(member, versions[2], 5)
    for each in (member, reopened(member)):
        assert (each.grant.keys_since, each.newest_generation) == (versions[2], versions[3])
        assert (each.grant.version_secret, each.grant.next_run) == (key.reveal(), 6)
        assert each.version_key(versions[3]).next_run == 1
    assert [secret in on_disk(member.directory) for secret in secrets] == [False, False, False, True]


def test_earlier_versions_serve_later_runs(parties, member):
    """The owner may have signed a run before it drew the newer keys, and the run begins only now."""
    versions = [member.grant.keys_since, rotate(parties, "dev-2"), rotate(parties, "dev-2")]
    drawn = [member.version_key(number) for number in versions]
    begun(member, versions[2], 5)
    for number, key in zip(versions[:2], drawn, strict=False):
        key.skip_to_run(6)
        for each in (member, reopened(member)):
            assert (each.version_key(number).next_run, each.version_key(number).reveal()) == (6, key.reveal())
    stepped = begun(member, versions[0], 7)
    assert member.grant.keys_since == versions[2], "an older version is not put in force again"
    again = reopened(member)
    assert again.version_key(versions[0]).reveal() == stepped.reveal()
    assert again.version_key(versions[1]).next_run == 8, (
        "nothing of run 7 or an earlier one follows from any older version"
    )


def test_only_newest_earlier_versions_stay(parties, member):
    versions = [member.grant.keys_since]
    for run in range(1, MOST_EARLIER + 3):
        versions.append(rotate(parties, "dev-2"))
        begun(member, versions[-1], run)
    with pytest.raises(NotEnrolledError):
        reopened(member).version_key(versions[0])
    assert reopened(member).version_key(versions[-2]).next_run == MOST_EARLIER + 3


def test_damaged_versions_are_refused(parties, member):
    """A damaged file of earlier versions is refused."""
    begun(member, rotate(parties, "dev-2"), 1)
    path = member.directory / EARLIER_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=EARLIER_FILE):
        reopened(member)


def test_stepped_key_keeps_the_broadcast_key(parties, member):
    """A stepped key leaves the broadcast key that the fleet uses."""
    rotate(parties, "dev-2", "aggregator")
    member.open_broadcast(*sealed(parties, key=parties.server.next.broadcast_key))
    begun(member, member.grant.keys_since, 1)
    assert member.group.secret == parties.server.next.broadcast_key


@pytest.mark.parametrize("waiting", [False, True], ids=["version in force", "waiting version"])
def test_power_cut_leaves_one_secret(parties, member, tmp_path, waiting):
    """The old one gives the same chain again. After the next start nothing is left of what is erased."""
    old = member.version_key(member.grant.keys_since)
    number = rotate(parties, "dev-2") if waiting else old.number
    drawn, cuts, seen, finished = member.version_key(number).reveal(), 0, set(), False
    while not finished:
        directory = tmp_path / f"copy-{cuts}"
        shutil.copytree(member.directory, directory)
        copy = DeviceMembership(directory)
        finished = cut_at(cuts, begun, copy, number, 2)
        cuts += 1
        again = DeviceMembership(directory)
        seen.add(again.version_key(number).next_run)
        chains = [begun(again, number, 2)] if again.version_key(number).next_run == 1 else []
        chains.append(again.version_key(number))
        assert len({key.reveal() for key in chains}) == 1
        again.erase_spent()
        remove_unfinished(directory)
        assert drawn not in on_disk(directory)
        assert (old.reveal() in on_disk(directory)) is False
    assert seen == {1, 3}


def test_no_version_secret_is_shown(member):
    key = member.version_key(member.grant.keys_since)
    shown = repr(key) + repr(member.grant) + repr(member)
    assert key.reveal().hex() not in shown
    assert repr(key.reveal()) not in shown


# -------------------------------------------------------------------------------------- the aggregator's messages


def sealed(parties, plain=b"x", purpose="control", *, key=None, sender="aggregator", fleet="reef", signer=None):
    """Return a broadcast and its digest; every part of it may be another."""
    group = GroupKey("reef", "broadcast", key or parties.server.grant.broadcast_key)
    head = dataclasses.replace(channels.CONTROL.head(fleet, sender), purpose=purpose)
    payload = memoryview(seal_to_group(signer or parties.server.identity, group, head, plain))
    return payload, Fingerprint.of(payload).signed


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"fleet": "atoll"}, UntrustedError, "^a message of 'aggregator' in 'atoll'$"),
        ({"sender": "dev-1"}, UntrustedError, "^a message of 'dev-1' in 'reef'$"),
        ({"signer": Identity.generate("aggregator")}, SealError, "refused"),
        ({"key": b"\1" * 32}, SealError, "refused"),
    ],
    ids=["fleet", "sender", "signer", "key"],
)
def test_foreign_broadcast_is_refused(parties, member, changes, error, message):
    """A broadcast that is not the aggregators to us is refused."""
    with pytest.raises(error, match=message):
        member.open_broadcast(*sealed(parties, **changes))


def test_newer_broadcast_key_changes_ours(parties, member):
    """A message under a newer broadcast key changes the key we answer under."""
    rotate(parties, "dev-2", "aggregator")
    newer, grant = parties.server.next.broadcast_key, member.grant
    purpose, plain = member.open_broadcast(*sealed(parties, b"hello", "announcement", key=newer))
    assert (purpose, bytes(plain), member.group.secret) == ("announcement", b"hello", newer)
    assert member.grant is grant, "only a run puts the other keys in force"
    member.open_broadcast(*sealed(parties))
    assert member.group.secret == grant.broadcast_key, "the fleet may go back to the keys in force"


def package(parties, sequence, signer=None):
    """Return a run package whose plan was signed under the roster of this sequence."""
    plan = sign_document(signer or parties.owner.owner, run_plan(fleet="reef", roster_sequence=sequence))
    return encode(RunPackage(plan, b"task", b"origins"))


@pytest.mark.parametrize(
    ("newer", "purpose", "expired", "brought"),
    [
        pytest.param(True, "run", False, True, id="the owner's newer run"),
        # The aggregator publishes the package again under the newer keys: the run's own are still needed.
        pytest.param(False, "run", False, False, id="an earlier run"),
        # It ignores rounds until a newer roster arrives, so it can't know which keys the fleet uses.
        pytest.param(True, "run", True, False, id="an expired roster"),
        pytest.param(True, "control", False, False, id="no run"),
    ],
)
def test_owners_newer_run_brings_keys(parties, member, newer, purpose, expired, brought):
    """A run that the owner signed under newer keys puts them in force."""
    before = member.grant
    new = rotate(parties, "dev-2", "aggregator")
    member.roster = dataclasses.replace(member.roster, expires_at_s=2 if expired else member.roster.expires_at_s)
    plan = package(parties, new if newer else before.keys_since)
    member.open_broadcast(*sealed(parties, plan, purpose, key=parties.server.next.broadcast_key))
    assert (member.grant is before) is not brought
    assert member.grant.keys_since == reopened(member).grant.keys_since == (new if brought else before.keys_since)


def test_aggregator_alone_changes_no_keys(parties, member):
    """An aggregator can't put newer keys in force without the owner."""
    new = rotate(parties, "dev-2", "aggregator")
    before, key = member.grant, parties.server.next.broadcast_key
    forged = package(parties, new, signer=parties.server.identity)
    with pytest.raises(UntrustedError):
        member.open_broadcast(*sealed(parties, forged, "run", key=key))
    assert member.grant is before


def test_roster_opens_without_broadcast_key(parties, member):
    """A roster for this device is opened without a broadcast key."""
    member.group = GroupKey("reef", "broadcast", bytes(32))
    assert member.open_own_roster(*own_roster(parties)) == b"signed"


def own_roster(parties, *, to="dev-2", recipient="dev-2", signer=None, fleet="reef", purpose=None):
    """Return a roster that the aggregator sealed to one device, and its digest."""
    head = channels.REVOCATION.head(fleet, "aggregator", recipient)
    head = dataclasses.replace(head, purpose=purpose or head.purpose)
    key = parties.members[to].identity.member.seal_key
    payload = memoryview(seal_to_member(signer or parties.server.identity, key, head, b"signed"))
    return payload, Fingerprint.of(payload).signed


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"recipient": "dev-1"}, UntrustedError, "^a roster of 'aggregator' where a roster for dev-2 belongs$"),
        ({"fleet": "atoll"}, UntrustedError, "where a roster for dev-2 belongs$"),
        ({"purpose": "control"}, UntrustedError, "^a control of 'aggregator' where a roster for dev-2 belongs$"),
        ({"to": "dev-1"}, SealError, "refused"),
        ({"signer": Identity.generate("aggregator")}, SealError, "refused"),
    ],
    ids=["recipient", "fleet", "purpose", "sealed to another", "signer"],
)
def test_foreign_roster_is_refused(parties, member, changes, error, message):
    """A roster that is not the aggregators to us is refused."""
    with pytest.raises(error, match=message):
        member.open_own_roster(*own_roster(parties, **changes))
