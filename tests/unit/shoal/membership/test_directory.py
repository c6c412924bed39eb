"""A party's directory: keys, grant and roster, private, and never an older roster."""

import dataclasses
import multiprocessing
import shutil
from pathlib import Path

import pytest

from aggregator import membership as aggregators
from aggregator.membership import AggregatorMembership
from crypto.seal.identity import Identity, sign_document
from crypto.seal.receiving import ReceivingSecrets
from edge_client import membership as enrolment
from edge_client.membership import DeviceMembership
from shoal import limits
from shoal.errors import ConfigError, IntegrityError, NotEnrolledError, UntrustedError
from shoal.membership import directory as memberships
from shoal.membership.directory import (
    GRANT_FILE,
    KEY_FILE,
    LEAST_FILE,
    MOST_LATER,
    NEXT_FILE,
    RECEIVING_FILE,
    load_receiving,
    make_identity,
)
from shoal.membership.grants import DEVICE_ROLE, ErasedKeyError, open_card, open_grant, seal_grant
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import ROSTER_FILE
from shoal.protocol.documents import DeviceGrant
from shoal.util.files import exclusive, write_private
from tests.helpers.earlier_formats import EARLIER_KINDS, earlier_grant
from tests.helpers.power_cuts import PowerCut
from tests.helpers.processes import run_at_once
from tests.helpers.receiving import device_card
from tests.helpers.refusals import refused, unchanged


@pytest.fixture
def fleet(tmp_path):
    """A fleet whose aggregator has joined."""
    made = FleetDirectory.create(tmp_path / "owner", "demo", "mqtt://loopback")
    grant = made.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    aggregators.join(tmp_path / "server", grant.read_bytes(), made.fingerprint)
    return made


@pytest.fixture
def server(fleet, tmp_path):
    return AggregatorMembership(tmp_path / "server")


@pytest.fixture
def grant(fleet, tmp_path):
    """The grant for a device that has not joined yet."""
    return fleet.add_device(enrolment.init(tmp_path / "dev-1", "dev-1").read_bytes()).read_bytes()


@pytest.fixture
def device(fleet, grant, tmp_path):
    return enrolment.join(tmp_path / "dev-1", grant, fleet.fingerprint)


def test_a_device_joins(fleet, device, server):
    """It shares with the aggregator what both should have, and the key version's secret with the owner alone."""
    assert (device.name, device.index, device.fleet, device.broker) == ("dev-1", 0, "demo", "mqtt://loopback")
    assert device.roster == fleet.roster
    assert device.owner_key == fleet.owner.member.sign_key
    assert DeviceMembership(device.directory).roster == fleet.roster
    assert device.group == server.group
    assert device.version_key(0).reveal() == fleet.version_key.reveal()
    assert not hasattr(server, "version_key")
    assert not hasattr(server.grant, "version_secret")


def test_no_secret_shows_anywhere(fleet, device, server):
    """Neither the objects nor their parts print a key."""
    shown = repr([fleet.secrets, fleet.broadcast, device.grant, device.group, device.version_key(0), server.grant])
    secrets = (fleet.secrets.version_secret, fleet.secrets.broadcast_key)
    assert [form for s in secrets for form in (s.hex(), repr(s)[2:-1]) if form in shown] == []


def test_aggregators_files_hold_no_secret(fleet, device, server):
    """Byte for byte: the key version's secret, from which all keys of rounds follow, is nowhere in its directory."""
    assert fleet.secrets.version_secret not in held(server.directory)
    assert fleet.secrets.version_secret in held(device.directory)


def test_nobody_joins_without_keys(fleet, device, tmp_path):
    """And keys are made once."""
    with pytest.raises(NotEnrolledError, match="no keys"):
        enrolment.join(tmp_path / "empty", grant_of(fleet), fleet.fingerprint)
    with pytest.raises(NotEnrolledError, match="belongs to no fleet"):
        DeviceMembership(tmp_path / "empty")
    with pytest.raises(ConfigError, match="holds keys already"):
        enrolment.init(device.directory, "dev-1")


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


def test_expired_roster_only_if_asked_for(fleet, device, server):
    """A device does, to hear of a newer one; the aggregator stops."""
    for party in (device, server):
        write_private(party.directory / ROSTER_FILE, signed_roster(fleet, sequence=9, expires_at_s=10**9))
    assert DeviceMembership(device.directory).expired
    with refused(UntrustedError, "has expired: it was valid until 2001-09-09T01:46:40Z", hint="clock"):
        AggregatorMembership(server.directory)
    assert not device.expired


def test_roster_of_aggregator_is_no_roster(device, server):
    forged = sign_document(server.identity, dataclasses.replace(device.roster, sequence=99))
    with pytest.raises(UntrustedError, match="not its sender's"):
        device.adopt(forged)


def test_reload_reads_what_owner_handed_out(fleet, server, grant):
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


def test_unnamed_aggregator_is_refused(fleet, server):
    """An aggregator that the roster does not name is refused."""
    other = dataclasses.replace(fleet.roster.aggregator, seal_key=bytes(32))
    write_private(server.directory / ROSTER_FILE, signed_roster(fleet, sequence=9, aggregator=other))
    with pytest.raises(UntrustedError, match="does not name this aggregator"):
        AggregatorMembership(server.directory)


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


def test_renewed_keys_contain_no_roster(fleet, device, server):
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
    assert server.take_grant(renewals["aggregator"])


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
    with unchanged(device.directory), refused(UntrustedError, "only renews the keys", hint="shoal-fleet add-device"):
        enrolment.join(device.directory, renewal, fleet.fingerprint)


def test_keys_of_another_roster_are_refused(fleet, device):
    """Only a faulty owner's program would make one."""
    new_grant(fleet, device)
    card = fleet.cards()[-1]
    with fleet.changing():
        true = open_grant(device.identity, fleet.grant_for(card), DeviceGrant, fleet.fingerprint, device.receiving)
    false = seal_grant(fleet.owner, card, dataclasses.replace(true, keys_since=7))
    with unchanged(device.directory), refused(UntrustedError, "keys of roster 7 and a roster of keys 0"):
        enrolment.join(device.directory, false, fleet.fingerprint)


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
    """The roster of a grant is kept once."""
    rotated(fleet, device, 2)
    assert device.adopt(fleet.roster_bytes)
    assert held(device.directory).count(fleet.roster_bytes) == 1
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


# -- A device's receiving keys on disk: erased once a delivery is stored, and no crash between two writes loses a delivery --


def card_in(directory):
    return open_card((directory / "dev-1.card").read_bytes()).receiving


def raw(key):
    return key.private_bytes_raw()


class Cuts:
    """Cuts the power at one of the renames by which files are replaced.

    Args:
        monkeypatch: pytest's.
        at: number of the rename; -1 for none.
        after: cut after it instead of before.
    """

    def __init__(self, monkeypatch, at=-1, *, after=False):
        self.names = []
        replace = Path.replace

        def cutting(path, target):
            number = len(self.names)
            self.names.append(Path(target).name)
            if number == at and not after:
                raise PowerCut
            replace(path, target)
            if number == at:
                raise PowerCut

        monkeypatch.setattr(Path, "replace", cutting)


JOIN_WRITES = ["roster.signed", "roster.least", GRANT_FILE, "dev-1.card", RECEIVING_FILE]
TAKE_WRITES = [f"{NEXT_FILE}.0000000004", "dev-1.card", RECEIVING_FILE]


def test_joining_erases_the_grants_key(fleet, grant, tmp_path, monkeypatch):
    """Joining stores the grant then erases its key."""
    before = load_receiving(tmp_path / "dev-1")
    with monkeypatch.context() as patched:
        cuts = Cuts(patched)
        device = enrolment.join(tmp_path / "dev-1", grant, fleet.fingerprint)
    assert cuts.names == JOIN_WRITES
    assert device.receiving.first == device.grant.receiving + 1 == 2
    assert raw(before.private(1)) not in held(device.directory)
    assert card_in(device.directory) == load_receiving(device.directory).public == device.receiving.public
    with refused(ErasedKeyError, "receiving key 1 of 'dev-1', which is erased", hint="shoal-fleet add-device"):
        enrolment.join(device.directory, grant, fleet.fingerprint)


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("at", range(len(JOIN_WRITES)), ids=JOIN_WRITES)
def test_power_cut_while_joining(fleet, grant, tmp_path, monkeypatch, at, after):
    """The device can open the grant again, or has stored it; then the next start erases the key."""
    directory = tmp_path / "dev-1"
    before = raw(load_receiving(directory).private(1))
    with monkeypatch.context() as patched:
        Cuts(patched, at, after=after)
        with pytest.raises(PowerCut):
            enrolment.join(directory, grant, fleet.fingerprint)
    stored = (at, after) >= (JOIN_WRITES.index(GRANT_FILE), True)
    assert (directory / GRANT_FILE).exists() is stored
    if stored:
        device = DeviceMembership(directory)
        device.erase_spent()
    else:
        device = enrolment.join(directory, grant, fleet.fingerprint)
    assert device.grant.version_secret == fleet.secrets.version_secret
    assert card_in(directory) == load_receiving(directory).public == device.receiving.public
    assert device.receiving.first == 2
    assert before not in held(directory)


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("at", range(len(TAKE_WRITES)), ids=TAKE_WRITES)
def test_power_cut_while_storing_secrets(fleet, device, monkeypatch, at, after):
    """A power cut while new secrets are stored loses no delivery."""
    directory, before = device.directory, raw(device.receiving.private(2))
    fleet.rotate()
    with monkeypatch.context() as patched:
        cuts = Cuts(patched, at, after=after)
        with pytest.raises(PowerCut):
            device.take_grant(grant_of(fleet))
    assert cuts.names == TAKE_WRITES[: at + 1]
    again = DeviceMembership(directory)
    again.erase_spent()
    stored = (at, after) >= (0, True)
    assert again.take_grant(grant_of(fleet)) is not stored
    assert again.next.version_secret == fleet.secrets.version_secret
    assert again.receiving.first == 3
    assert card_in(directory) == load_receiving(directory).public == again.receiving.public
    assert before not in held(directory)


def test_several_deliveries_may_wait(fleet, device):
    """The owner has heard nothing from it in between."""
    waiting = []
    for _ in range(limits.RECEIVING_KEYS - 1):
        fleet.rotate()
        waiting.append(grant_of(fleet))
    for data in waiting:
        assert device.take_grant(data)
    assert device.receiving.first == limits.RECEIVING_KEYS + 1
    fleet.rotate()
    with pytest.raises(ErasedKeyError, match=f"receiving key {limits.RECEIVING_KEYS} "):
        device.take_grant(grant_of(fleet))
    fleet.take_receiving({"dev-1": device.receiving.public})
    with fleet.changing():
        assert device.take_grant(fleet.grant_for(fleet.cards()[-1], renewal=True))


def test_newest_delivery_erases_all_keys(fleet, device):
    """The newest of several deliveries erases the keys of all."""
    before = device.receiving
    for _ in range(3):
        fleet.rotate()
    assert device.take_grant(grant_of(fleet))
    assert not any(raw(before.private(number)) in held(device.directory) for number in (2, 3, 4))


def test_an_old_card_brings_no_old_keys_back(fleet, grant, tmp_path):
    """A card renews a grant by hand: after damage, or with another address of the broker."""
    old = (tmp_path / "dev-1" / "dev-1.card").read_bytes()
    device = enrolment.join(tmp_path / "dev-1", grant, fleet.fingerprint)
    fleet.take_receiving({"dev-1": device.receiving.public})
    fleet.add_device(old)
    assert enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint).receiving.first == 3
    assert enrolment.join(device.directory, new_grant(fleet, device), fleet.fingerprint).receiving.first == 4


def test_earlier_device_is_refused(fleet, device):
    """A device of an earlier version is refused, and so are damaged keys."""
    write_private(device.directory / RECEIVING_FILE, b"junk")
    with pytest.raises(IntegrityError, match=RECEIVING_FILE):
        DeviceMembership(device.directory)
    (device.directory / RECEIVING_FILE).unlink()
    earlier = {"match": "an earlier version of Shoal made it", "hint": "init or enrol a new one under another name"}
    with refused(NotEnrolledError, **earlier):
        DeviceMembership(device.directory)
    with refused(NotEnrolledError, **earlier):
        enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint)


def test_backup_goes_on_while_its_keys_last(fleet, device, tmp_path):
    """A directory from a backup goes on while its keys last."""
    shutil.copytree(device.directory, tmp_path / "backup")
    for _ in range(2):
        fleet.rotate()
        assert device.take_grant(grant_of(fleet))
    restored = DeviceMembership(tmp_path / "backup")
    fleet.rotate()
    assert restored.take_grant(grant_of(fleet))


def test_an_aggregator_has_none(fleet, server):
    """Its grant opens nothing that devices keep from it."""
    grant = fleet.add_aggregator((server.directory / "aggregator.card").read_bytes())
    member = aggregators.join(server.directory, grant.read_bytes(), fleet.fingerprint)
    assert (server.receiving, member.receiving) == (None, None)
    assert not (server.directory / RECEIVING_FILE).exists()


@pytest.mark.parametrize("at", range(3))
def test_power_cut_in_init(tmp_path, monkeypatch, at):
    """A power cut in init leaves nothing or keys that fit."""
    with monkeypatch.context() as patched:
        cuts = Cuts(patched, at)
        with pytest.raises(PowerCut):
            make_identity(tmp_path / "d", "dev-1", "device")
    assert cuts.names == [RECEIVING_FILE, KEY_FILE, "dev-1.card"][: at + 1]
    card = make_identity(tmp_path / "d", "dev-1", "device")
    assert open_card(card.read_bytes()).receiving == ReceivingSecrets.load(tmp_path / "d" / RECEIVING_FILE).public


def test_foreign_grant_erases_nothing(fleet, device, tmp_path):
    """A grant of somebody else leaves nothing behind."""
    other = fleet.add_device(enrolment.init(tmp_path / "dev-2", "dev-2").read_bytes()).read_bytes()
    before = load_receiving(device.directory).public
    with pytest.raises(UntrustedError, match="is not for the keys of"):
        enrolment.join(device.directory, other, fleet.fingerprint)
    assert load_receiving(device.directory).public == before
    with pytest.raises(UntrustedError, match="is not for the keys of"):
        enrolment.join(tmp_path / "dev-2", grant_of(fleet), fleet.fingerprint)
    assert not (tmp_path / "dev-2" / GRANT_FILE).exists()


# -- Keys, grants and rosters in a directory that is in use: nothing is lost, rolled back, or taken into another fleet --


SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def at_once(monkeypatch):
    """Don't wait for another program to end."""
    monkeypatch.setattr(memberships, "WAIT_S", 0.0)


def test_nobody_joins_beside_running_program(fleet, device, at_once):
    """It would write its older grant back with the next run that it begins."""
    fleet.rotate()
    with (
        unchanged(device.directory),
        exclusive(device.directory, wait_s=0, hint="-"),
        refused(
            ConfigError,
            "in use by another program",
            hint="end `shoal-edge run` or `shoal-aggregator serve` there first",
        ),
    ):
        enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint)
    assert enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint).roster == fleet.roster


def test_no_keys_beside_a_running_program(tmp_path, at_once):
    """No keys are made beside a running program."""
    (tmp_path / "d").mkdir()
    with exclusive(tmp_path / "d", wait_s=0, hint="-"), pytest.raises(ConfigError, match="in use by another program"):
        enrolment.init(tmp_path / "d", "dev-1")
    assert not (tmp_path / "d" / KEY_FILE).exists()


def make(directory, name, told, begin):
    begin.wait(60)
    try:
        make_identity(directory, name, DEVICE_ROLE)
    except ConfigError as error:
        told.put(str(error))
    else:
        told.put("")


@pytest.mark.slow
def test_two_inits_at_once_make_one_card(tmp_path):
    """Of two inits at once one makes keys and card."""
    for number in range(3):
        directory, told = tmp_path / f"dev-{number}", SPAWN.Queue()
        run_at_once(make, *[(directory, "dev-1", told)] * 2)
        assert sorted(told.get(timeout=60) for _ in range(2)) == ["", f"{directory} holds keys already"]
        card = open_card((directory / "dev-1.card").read_bytes())
        assert card.member == Identity.load(directory / KEY_FILE).member


def test_next_init_writes_a_missing_card(tmp_path):
    """A card that a crash has prevented is written by the next init."""
    card = enrolment.init(tmp_path / "d", "dev-1")
    first = card.read_bytes()
    card.unlink()
    with pytest.raises(ConfigError, match="holds keys already"):
        enrolment.init(tmp_path / "d", "dev-2")
    assert enrolment.init(tmp_path / "d", "dev-1") == card
    assert open_card(card.read_bytes()) == open_card(first)
    assert card.stat().st_mode & 0o777 == 0o644
    with pytest.raises(ConfigError, match="holds keys already"):
        enrolment.init(tmp_path / "d", "dev-1")


def test_another_fleet_needs_its_directory(fleet, device, tmp_path):
    """A device's high-water mark is of one fleet: it would refuse every round of the next."""
    for name in ("lagoon", "demo"):
        other = FleetDirectory.create(tmp_path / f"other-{name}", name, "mqtt://loopback")
        other.add_aggregator(aggregators.init(tmp_path / f"server-{name}").read_bytes())
        other.add_device((device.directory / "dev-1.card").read_bytes())
        with (
            unchanged(device.directory),
            refused(ConfigError, "belongs to fleet 'demo'", hint="use another directory"),
        ):
            enrolment.join(device.directory, grant_of(other), other.fingerprint)


def test_an_older_grant_rolls_nothing_back(fleet, device):
    old = grant_of(fleet)
    fleet.add_device(device_card(Identity.generate("dev-2")))
    fleet.revoke("dev-2")
    enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint)
    with unchanged(device.directory), refused(UntrustedError, "sealed to receiving key 1"):
        enrolment.join(device.directory, old, fleet.fingerprint)


def test_grant_with_older_roster_is_refused(fleet, device):
    """A grant with an older roster than the networks is refused."""
    old = new_grant(fleet, device)
    fleet.renew()
    device.adopt(fleet.roster_bytes)
    with unchanged(device.directory), refused(UntrustedError, "refused as a rollback", hint="newest grant"):
        enrolment.join(device.directory, old, fleet.fingerprint)
    enrolment.join(device.directory, new_grant(fleet, device), fleet.fingerprint)


def rosters(fleet, count):
    made = []
    for _ in range(count):
        fleet.renew()
        made.append(fleet.roster_bytes)
    return made


def test_carried_roster_survives_older_one(fleet, server):
    """A roster carried by hand survives an older one from the network."""
    older, newer = rosters(fleet, 2)
    write_private(server.directory / ROSTER_FILE, newer)
    with pytest.raises(UntrustedError, match="rollback"):
        server.adopt(older)
    assert (server.directory / ROSTER_FILE).read_bytes() == server.roster_bytes == newer


def test_damaged_roster_lets_a_newer_one_in(fleet, server):
    """A damaged roster file does not keep a newer roster out."""
    write_private(server.directory / ROSTER_FILE, b"junk")
    (newer,) = rosters(fleet, 1)
    assert server.adopt(newer)
    assert AggregatorMembership(server.directory).roster_bytes == newer


@pytest.mark.parametrize("way", ["by hand", "by hand before a start", "network", "grant"])
def test_rollback_is_refused_after_a_restart(fleet, server, way):
    """What was refused as a rollback is refused after a restart."""
    older, newer = rosters(fleet, 2)
    if way == "network":
        assert server.adopt(newer)
    elif way == "grant":
        with fleet.changing():
            (card,) = [c for c in fleet.cards() if c.role == "aggregator"]
            aggregators.join(server.directory, fleet.grant_for(card), fleet.fingerprint)
    else:
        write_private(server.directory / ROSTER_FILE, newer)
        server = AggregatorMembership(server.directory) if way == "by hand before a start" else server
        server.reload()
    write_private(server.directory / ROSTER_FILE, older)
    with pytest.raises(UntrustedError, match="refused as a rollback"):
        AggregatorMembership(server.directory)
    write_private(server.directory / ROSTER_FILE, newer)
    assert AggregatorMembership(server.directory).roster == fleet.roster


@pytest.mark.parametrize("junk", [b"", b"-1", b"5x", b"9" * 4000, b"\xff", b" 5"])
def test_a_damaged_least_sequence_is_told(server, junk):
    write_private(server.directory / LEAST_FILE, junk)
    with refused(IntegrityError, r"roster\.least is damaged", hint="remove it only if"):
        AggregatorMembership(server.directory)


def test_other_files_are_no_waiting_grants(fleet, device):
    """Editors and copies may leave files with similar names."""
    fleet.rotate()
    device.take_grant(grant_of(fleet))
    for name in ("membership.next.0000000003~", "membership.next.3", "membership.next.00000000031", "membership.next."):
        (device.directory / name).write_bytes(b"junk")
    again = DeviceMembership(device.directory)
    assert again.later == device.later
    again.promote(again.later[0])
    assert len(list(device.directory.glob("membership.next.*"))) == 4


def test_reader_during_a_change_reads_twice(fleet, device, monkeypatch):
    """`shoal-edge status` beside `shoal-edge run`: the waiting grant is gone between finding and reading it."""
    fleet.rotate()
    device.take_grant(grant_of(fleet))
    real = memberships.read_private

    def read(path):
        if path.name.startswith("membership.next.") and device.later:
            device.promote(device.later[0])
        return real(path)

    monkeypatch.setattr(memberships, "read_private", read)
    seen = DeviceMembership(device.directory)
    assert (seen.grant, seen.later) == (dataclasses.replace(device.grant), [])


def test_unsigned_roster_blocks_no_joining(fleet, device):
    """A forged roster file with a high sequence can't lock the device out, nor can a damaged grant."""
    forged = sign_document(device.identity, dataclasses.replace(fleet.roster, sequence=1 << 30))
    write_private(device.directory / ROSTER_FILE, forged)
    write_private(device.directory / GRANT_FILE, b"junk")
    assert enrolment.join(device.directory, new_grant(fleet, device), fleet.fingerprint).roster == fleet.roster
