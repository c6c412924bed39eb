"""A party's directory: keys, grant and roster, private, and never an older roster."""

import dataclasses
import stat

import pytest

from aggregator import membership as aggregators
from aggregator.membership import AggregatorMembership
from crypto.seal.identity import Identity, sign_document
from edge_client import membership as enrolment
from edge_client.membership import DeviceMembership
from shoal.errors import ConfigError, IntegrityError, NotEnrolledError, UntrustedError
from shoal.membership.directory import GRANT_FILE, MOST_LATER, NEXT_FILE
from shoal.membership.grants import open_grant, seal_grant
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import ROSTER_FILE
from shoal.protocol.documents import DeviceGrant
from shoal.util.files import write_private
from tests.helpers.earlier_formats import EARLIER_KINDS, earlier_grant
from tests.helpers.receiving import device_card
from tests.helpers.refusals import refused


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "demo", "mqtt://loopback")
    card = aggregators.init(tmp_path / "aggregator")
    grant = made.add_aggregator(card.read_bytes())
    aggregators.join(tmp_path / "aggregator", grant.read_bytes(), made.fingerprint)
    return made


@pytest.fixture
def device(fleet, tmp_path):
    card = enrolment.init(tmp_path / "device", "dev-1")
    grant = fleet.add_device(card.read_bytes())
    return enrolment.join(tmp_path / "device", grant.read_bytes(), fleet.fingerprint)


def test_a_device_joins(fleet, device):
    assert (device.name, device.index, device.fleet, device.broker) == ("dev-1", 0, "demo", "mqtt://loopback")
    assert device.roster == fleet.roster
    assert device.owner_key == fleet.owner.member.sign_key
    assert DeviceMembership(device.directory).roster == fleet.roster


def test_both_sides_share_what_they_should(fleet, device, tmp_path):
    server = AggregatorMembership(tmp_path / "aggregator")
    assert device.group == server.group
    assert device.version_key(0).reveal() == fleet.version_key.reveal()
    assert not hasattr(server, "version_key")
    assert not hasattr(server.grant, "version_secret")


def test_everything_private_is_private(device):
    assert stat.S_IMODE(device.directory.stat().st_mode) == 0o700
    for name in ("identity.key", "receiving.key", "membership.bin", "roster.signed"):
        assert stat.S_IMODE((device.directory / name).stat().st_mode) == 0o600


def test_the_owners_directory_is_private(fleet):
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [fleet.path, *fleet.path.rglob("*")]}
    assert all(mode in (0o600, 0o700) for mode in modes.values())
    assert modes["owner"] == modes["grants"] == modes["runs"] == 0o700
    assert modes["secrets.bin"] == modes["owner.key"] == 0o600


def test_no_secret_shows_anywhere(fleet, device, tmp_path):
    """Neither the objects nor their parts print a key."""
    server = AggregatorMembership(tmp_path / "aggregator")
    secrets = [fleet.secrets.version_secret, fleet.secrets.broadcast_key]
    shown = "".join(
        repr(x)
        for x in (
            fleet.secrets,
            fleet.broadcast,
            device.grant,
            device.group,
            device.version_key(0),
            server.grant,
        )
    )
    for secret in secrets:
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown


def test_aggregators_files_hold_no_secret(fleet, device, tmp_path):
    """Byte for byte: the key version's secret, from which all keys of rounds follow, is nowhere in its directory."""
    for path in (tmp_path / "aggregator").rglob("*"):
        if path.is_file():
            assert fleet.secrets.version_secret not in path.read_bytes()
    assert any(fleet.secrets.version_secret in p.read_bytes() for p in device.directory.iterdir())


def test_keys_are_made_once(device):
    with pytest.raises(ConfigError, match="holds keys already"):
        enrolment.init(device.directory, "dev-1")


def test_nobody_joins_without_keys(fleet, device, tmp_path):
    grant = (fleet.path / "grants" / "dev-1.grant").read_bytes()
    with pytest.raises(NotEnrolledError, match="no keys"):
        enrolment.join(tmp_path / "empty", grant, fleet.fingerprint)
    with pytest.raises(NotEnrolledError, match="belongs to no fleet"):
        DeviceMembership(tmp_path / "empty")


def test_foreign_grant_leaves_nothing_behind(fleet, device, tmp_path):
    """A grant for another device leaves nothing behind."""
    enrolment.init(tmp_path / "other", "dev-2")
    grant = (fleet.path / "grants" / "dev-1.grant").read_bytes()
    with pytest.raises(UntrustedError):
        enrolment.join(tmp_path / "other", grant, fleet.fingerprint)
    assert not (tmp_path / "other" / "membership.bin").exists()


def signed_roster(owners, /, **changes):
    return sign_document(owners.owner, dataclasses.replace(owners.roster, **changes))


def test_a_newer_roster_is_taken_up_and_kept(fleet, device):
    fleet.renew()
    assert device.adopt(fleet.roster_bytes)
    assert not device.adopt(fleet.roster_bytes)
    assert DeviceMembership(device.directory).roster.sequence == fleet.roster.sequence


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"sequence": 1}, "rollback"), ({"expires_at_s": 1}, "expired"), ({"fleet": "other"}, "of fleet 'other'")],
)
def test_roster_from_the_network_is_checked(fleet, device, changes, match):
    before = device.roster
    later = {"sequence": fleet.roster.sequence + 1, **changes}
    with pytest.raises(UntrustedError, match=match):
        device.adopt(signed_roster(fleet, **later))
    assert device.roster == before
    assert DeviceMembership(device.directory).roster == before


def test_expired_roster_only_if_asked_for(fleet, device, tmp_path):
    """A device does, to hear of a newer one; the aggregator stops."""
    for party in (device.directory, tmp_path / "aggregator"):
        write_private(party / ROSTER_FILE, signed_roster(fleet, sequence=9, expires_at_s=10**9))
    assert DeviceMembership(device.directory).expired
    with refused(UntrustedError, "has expired: it was valid until 2001-09-09T01:46:40Z", hint="clock"):
        AggregatorMembership(tmp_path / "aggregator")
    assert not device.expired


def test_roster_of_aggregator_is_no_roster(device, tmp_path):
    server = AggregatorMembership(tmp_path / "aggregator")
    forged = sign_document(server.identity, dataclasses.replace(device.roster, sequence=99))
    with pytest.raises(UntrustedError, match="not its sender's"):
        device.adopt(forged)


def test_reload_reads_what_owner_handed_out(fleet, device, tmp_path):
    server = AggregatorMembership(tmp_path / "aggregator")
    assert server.roster.devices == ()
    assert not server.reload()
    write_private(server.directory / ROSTER_FILE, fleet.roster_bytes)
    assert server.reload()
    assert server.roster.active() == ("dev-1",)
    write_private(server.directory / ROSTER_FILE, signed_roster(fleet, sequence=1))
    with pytest.raises(UntrustedError, match="rollback"):
        server.reload()


def test_a_revoked_device_has_no_place(fleet, device):
    device.adopt(signed_roster(fleet, sequence=9, revoked=("dev-1",)))
    with pytest.raises(UntrustedError, match="not in the fleet's roster any more"):
        _ = device.index


def test_unnamed_aggregator_is_refused(fleet, tmp_path):
    """An aggregator that the roster does not name is refused."""
    aggregators.init(tmp_path / "second", "aggregator")
    with pytest.raises(ConfigError, match="has an aggregator already"):
        fleet.add_aggregator((tmp_path / "second" / "aggregator.card").read_bytes())
    write_private(
        tmp_path / "aggregator" / ROSTER_FILE,
        signed_roster(fleet, sequence=9, aggregator=dataclasses.replace(fleet.roster.aggregator, seal_key=bytes(32))),
    )
    with pytest.raises(UntrustedError, match="does not name this aggregator"):
        AggregatorMembership(tmp_path / "aggregator")


def test_a_name_belongs_to_one_device(fleet, device, tmp_path):
    card = enrolment.init(tmp_path / "twin", "dev-1")
    with pytest.raises(ConfigError, match="another device called 'dev-1'"):
        fleet.add_device(card.read_bytes())


def test_owner_can_insist_on_a_fingerprint(fleet, tmp_path):
    card = enrolment.init(tmp_path / "x", "dev-7")
    with pytest.raises(UntrustedError, match="has fingerprint"):
        fleet.add_device(card.read_bytes(), "aaaa-bbbb-cccc-dddd-eeee-ffff")
    with pytest.raises(UntrustedError, match="asks to be 'device'"):
        fleet.add_aggregator(card.read_bytes())


# ---------------------------------------------------------------------------------------------------- newer secrets


def grant_of(fleet, name="dev-1"):
    return (fleet.path / "grants" / f"{name}.grant").read_bytes()


def new_grant(fleet, device):
    """Return a grant that the device can open, since its card brings its newest receiving keys."""
    return fleet.add_device((device.directory / "dev-1.card").read_bytes()).read_bytes()


def rotated(fleet, device, times=1):
    """Let the owner draw new secrets and the device take them; return their generations."""
    generations = []
    for _ in range(times):
        fleet.rotate()
        assert device.take_grant(grant_of(fleet))
        fleet.take_receiving({"dev-1": device.receiving.public})
        generations.append(fleet.roster.keys_since)
    return generations


def held(directory):
    """Return the contents of all files in a directory, concatenated."""
    return b"".join(p.read_bytes() for p in directory.iterdir() if p.is_file())


RENEWAL_BYTES = 1024
"""Largest message with new keys for one party, for any size of the fleet."""


def test_renewed_keys_contain_no_roster(fleet, device, tmp_path):
    """N rosters of n devices would be gigabytes on a large fleet's broker; the roster is sent once, separately."""
    for number in range(30):
        fleet.add_device(device_card(Identity.generate(f"more-{number}")))
    fleet.rotate()
    before = device.roster
    assert len(fleet.roster_bytes) > 2 * RENEWAL_BYTES
    with fleet.changing():
        renewals = {card.member.name: fleet.grant_for(card, renewal=True) for card in fleet.cards()}
    assert max(map(len, renewals.values())) < RENEWAL_BYTES
    assert device.take_grant(renewals["dev-1"])
    assert not device.take_grant(grant_of(fleet))
    for member in (device, DeviceMembership(device.directory)):
        assert member.roster == before
        assert member.keys_since == fleet.roster.keys_since > before.keys_since
        assert member.next.version_secret == fleet.secrets.version_secret
    assert AggregatorMembership(tmp_path / "aggregator").take_grant(renewals["aggregator"])


def test_files_again_for_those_who_had_files(fleet, device):
    """A grant holds the whole roster: n of them would be gigabytes on the owner's disk, for devices that hear by the broker."""
    (fleet.path / "grants" / "aggregator.grant").unlink()
    fleet.rotate()
    assert [p.name for p in (fleet.path / "grants").iterdir()] == ["dev-1.grant"]
    assert device.take_grant(grant_of(fleet))


def test_nobody_joins_with_keys_alone(fleet, device):
    new_grant(fleet, device)
    with fleet.changing():
        renewal = fleet.grant_for(fleet.cards()[-1], renewal=True)
    before = held(device.directory)
    with refused(UntrustedError, "only renews the keys", hint="shoal-fleet add-device"):
        enrolment.join(device.directory, renewal, fleet.fingerprint)
    assert held(device.directory) == before


def test_keys_of_another_roster_are_refused(fleet, device):
    """Only a faulty owner's program would make one."""
    new_grant(fleet, device)
    card = fleet.cards()[-1]
    with fleet.changing():
        true = open_grant(device.identity, fleet.grant_for(card), DeviceGrant, fleet.fingerprint, device.receiving)
    false = seal_grant(fleet.owner, card, dataclasses.replace(true, keys_since=7))
    before = held(device.directory)
    with pytest.raises(UntrustedError, match="keys of roster 7 and a roster of keys 0"):
        enrolment.join(device.directory, false, fleet.fingerprint)
    assert held(device.directory) == before


def test_the_roster_of_a_grant_is_kept_once(fleet, device):
    rotated(fleet, device)
    assert device.adopt(fleet.roster_bytes)
    assert held(device.directory).count(fleet.roster_bytes) == 1


def test_waiting_secrets_are_stored(fleet, device):
    """The owner has changed the secrets several times, and the fleet's run may use each of them."""
    first, second, third = rotated(fleet, device, 3)
    assert [g.keys_since for g in device.later] == [first, second, third]
    assert device.next == device.later[-1]
    again = DeviceMembership(device.directory)
    assert again.later == device.later
    old, passed = again.grant.version_secret, again.later[0].version_secret
    again.promote(again.later[1])
    assert [g.keys_since for g in (again.grant, *again.later)] == [second, third]
    for member in (again, DeviceMembership(device.directory)):
        assert [g.keys_since for g in (member.grant, *member.later)] == [second, third]
    assert old not in held(device.directory)
    assert passed not in held(device.directory)


def test_newer_grants_are_found(fleet, device):
    """Newer grants are found by what they were drawn for."""
    first, second = rotated(fleet, device, 2)
    assert device.newer(first - 1) is None
    assert device.newer(first) == device.newer(second - 1) == device.later[0]
    assert device.newer(second + 9) == device.later[1]
    assert [device.grant_of(g).keys_since for g in (0, first, second)] == [0, first, second]
    with pytest.raises(NotEnrolledError, match=f"no keys of roster {first - 1}"):
        device.grant_of(first - 1)


def test_older_newer_secrets_don_t_come_back(fleet, device):
    fleet.rotate()
    recorded = grant_of(fleet)
    rotated(fleet, device)
    assert not device.take_grant(recorded)
    assert len(device.later) == 1


def test_only_so_many_are_kept(fleet, device):
    generations = rotated(fleet, device, MOST_LATER + 3)
    assert [g.keys_since for g in device.later] == generations[3:]
    assert DeviceMembership(device.directory).later == device.later
    assert len(list(device.directory.glob(f"{NEXT_FILE}.*"))) == MOST_LATER


def test_power_cut_while_promoting_heals(fleet, device):
    """The grant is in force, its waiting file still there."""
    (generation,) = rotated(fleet, device)
    (waiting,) = device.directory.glob(f"{NEXT_FILE}.*")
    data = waiting.read_bytes()
    device.promote(device.later[0])
    write_private(waiting, data)
    again = DeviceMembership(device.directory)
    assert (again.later, again.grant.keys_since) == ([], generation)


def test_grant_given_by_hand_ends_waiting(fleet, device):
    rotated(fleet, device, 2)
    member = enrolment.join(device.directory, new_grant(fleet, device), fleet.fingerprint)
    assert member.later == []
    assert list(device.directory.glob(f"{NEXT_FILE}.*")) == []


@pytest.mark.parametrize("kind", EARLIER_KINDS)
@pytest.mark.parametrize("file", [GRANT_FILE, f"{NEXT_FILE}.0000000099"])
def test_earlier_version_is_refused(device, file, kind):
    """The directory of an earlier version is refused with what to do."""
    write_private(device.directory / file, earlier_grant(dataclasses.replace(device.grant, roster=b""), kind))
    with refused(
        IntegrityError,
        f"{file} is damaged, or an earlier version of Shoal wrote it",
        hint="If an earlier version of Shoal made the fleet, make a new one",
    ):
        DeviceMembership(device.directory)
