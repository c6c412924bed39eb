"""Keys, grants and rosters in a directory that is in use: nothing is lost, rolled back, or taken into another fleet."""

import dataclasses
import multiprocessing

import pytest

from aggregator import membership as aggregators
from aggregator.membership import AggregatorMembership
from crypto.seal.identity import Identity, sign_document
from edge_client import membership as enrolment
from edge_client.membership import DeviceMembership
from shoal.errors import ConfigError, IntegrityError, UntrustedError
from shoal.membership import directory as memberships
from shoal.membership.directory import KEY_FILE, LEAST_FILE, ROSTER_FILE, make_identity
from shoal.membership.grants import DEVICE_ROLE, open_card
from shoal.owner.keys.directory import FleetDirectory
from shoal.util.files import exclusive, write_private
from tests.helpers.receiving import device_card
from tests.helpers.refusals import refused

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "demo", "mqtt://loopback")
    grant = made.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    aggregators.join(tmp_path / "server", grant.read_bytes(), made.fingerprint)
    return made


@pytest.fixture
def device(fleet, tmp_path):
    grant = fleet.add_device(enrolment.init(tmp_path / "device", "dev-1").read_bytes())
    return enrolment.join(tmp_path / "device", grant.read_bytes(), fleet.fingerprint)


@pytest.fixture
def server(fleet, tmp_path):
    return AggregatorMembership(tmp_path / "server")


def grant_of(fleet, name="dev-1"):
    return (fleet.path / "grants" / f"{name}.grant").read_bytes()


def new_grant(fleet, device):
    """Return a grant that the device can open, since its card brings its newest receiving keys."""
    return fleet.add_device((device.directory / "dev-1.card").read_bytes()).read_bytes()


def held(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != ".lock"}


@pytest.fixture
def at_once(monkeypatch):
    """Don't wait for another program to end."""
    monkeypatch.setattr(memberships, "WAIT_S", 0.0)


def test_nobody_joins_beside_running_program(fleet, device, at_once):
    """It would write its older grant back with the next run that it begins."""
    fleet.rotate()
    before = held(device.directory)
    with (
        exclusive(device.directory, wait_s=0, hint="-"),
        refused(
            ConfigError,
            "in use by another program",
            hint="end `shoal-edge run` or `shoal-aggregator serve` there first",
        ),
    ):
        enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint)
    assert held(device.directory) == before
    assert enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint).roster == fleet.roster


def test_no_keys_beside_a_running_program(tmp_path, at_once):
    """No keys are made beside a running program."""
    (tmp_path / "d").mkdir()
    with exclusive(tmp_path / "d", wait_s=0, hint="-"), pytest.raises(ConfigError, match="in use by another program"):
        enrolment.init(tmp_path / "d", "dev-1")
    assert not (tmp_path / "d" / KEY_FILE).exists()


def make(directory, name, begin, told):
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
        directory, begin, told = tmp_path / f"dev-{number}", SPAWN.Barrier(2), SPAWN.Queue()
        programs = [SPAWN.Process(target=make, args=(directory, "dev-1", begin, told)) for _ in range(2)]
        for program in programs:
            program.start()
        answers = sorted(told.get(timeout=60) for _ in programs)
        for program in programs:
            program.join()
        assert answers == ["", f"{directory} holds keys already"]
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
    before = held(device.directory)
    for name in ("lagoon", "demo"):
        other = FleetDirectory.create(tmp_path / f"other-{name}", name, "mqtt://loopback")
        other.add_aggregator(aggregators.init(tmp_path / f"server-{name}").read_bytes())
        other.add_device((device.directory / "dev-1.card").read_bytes())
        with refused(ConfigError, "belongs to fleet 'demo'", hint="use another directory"):
            enrolment.join(device.directory, grant_of(other), other.fingerprint)
    assert held(device.directory) == before


def test_an_older_grant_rolls_nothing_back(fleet, device):
    old = grant_of(fleet)
    fleet.add_device(device_card(Identity.generate("dev-2")))
    fleet.revoke("dev-2")
    enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint)
    before = held(device.directory)
    with pytest.raises(UntrustedError, match="sealed to receiving key 1"):
        enrolment.join(device.directory, old, fleet.fingerprint)
    assert held(device.directory) == before


def test_grant_with_older_roster_is_refused(fleet, device):
    """A grant with an older roster than the networks is refused."""
    old = new_grant(fleet, device)
    fleet.renew()
    device.adopt(fleet.roster_bytes)
    before = held(device.directory)
    with refused(UntrustedError, "refused as a rollback", hint="newest grant"):
        enrolment.join(device.directory, old, fleet.fingerprint)
    assert held(device.directory) == before
    enrolment.join(device.directory, new_grant(fleet, device), fleet.fingerprint)


def test_joining_again_mends_a_grant(fleet, device):
    """A damaged grant is mended by joining again."""
    write_private(device.directory / "membership.bin", b"junk")
    assert enrolment.join(device.directory, new_grant(fleet, device), fleet.fingerprint).roster == fleet.roster


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
    """A forged roster file with a high sequence can't lock the device out."""
    forged = sign_document(device.identity, dataclasses.replace(fleet.roster, sequence=1 << 30))
    write_private(device.directory / ROSTER_FILE, forged)
    assert enrolment.join(device.directory, new_grant(fleet, device), fleet.fingerprint).roster == fleet.roster
