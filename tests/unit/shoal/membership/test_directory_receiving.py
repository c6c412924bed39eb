"""A device's receiving keys on disk: erased once a delivery is stored, and no crash between two writes loses a delivery."""

import shutil
from pathlib import Path

import pytest

from aggregator import membership as aggregators
from crypto.seal.receiving import ReceivingSecrets
from edge_client import membership as enrolment
from edge_client.membership import DeviceMembership
from shoal import limits
from shoal.errors import IntegrityError, NotEnrolledError, UntrustedError
from shoal.membership.directory import GRANT_FILE, KEY_FILE, NEXT_FILE, RECEIVING_FILE, load_receiving, make_identity
from shoal.membership.grants import ErasedKeyError, open_card
from shoal.owner.keys.directory import FleetDirectory
from shoal.util.files import write_private
from tests.helpers.power_cuts import PowerCut
from tests.helpers.refusals import refused


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "demo", "mqtt://loopback")
    made.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    return made


@pytest.fixture
def grant(fleet, tmp_path):
    """The grant for a device that has not joined yet."""
    return fleet.add_device(enrolment.init(tmp_path / "dev-1", "dev-1").read_bytes()).read_bytes()


@pytest.fixture
def device(fleet, grant, tmp_path):
    return enrolment.join(tmp_path / "dev-1", grant, fleet.fingerprint)


def grant_of(fleet):
    return (fleet.path / "grants" / "dev-1.grant").read_bytes()


def card_in(directory):
    return open_card((directory / "dev-1.card").read_bytes()).receiving


def held(directory):
    """Return the contents of all files in a directory, concatenated."""
    return b"".join(p.read_bytes() for p in directory.iterdir() if p.is_file())


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


def test_stored_delivery_is_left_out(fleet, device):
    """The broker retains each delivery, and delivers it again after each restart of the device."""
    fleet.rotate()
    assert device.take_grant(grant_of(fleet))
    assert not device.take_grant(grant_of(fleet))
    again = DeviceMembership(device.directory)
    again.promote(again.next)
    assert not again.take_grant(grant_of(fleet))


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


def test_card_renews_a_grant_by_hand(fleet, device):
    """Joining again after damage, or with another address of the broker."""
    renewed = fleet.add_device((device.directory / "dev-1.card").read_bytes()).read_bytes()
    assert enrolment.join(device.directory, renewed, fleet.fingerprint).receiving.first == 3


def test_an_old_card_brings_no_old_keys_back(fleet, grant, tmp_path):
    old = (tmp_path / "dev-1" / "dev-1.card").read_bytes()
    device = enrolment.join(tmp_path / "dev-1", grant, fleet.fingerprint)
    fleet.take_receiving({"dev-1": device.receiving.public})
    fleet.add_device(old)
    assert enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint).receiving.first == 3


def test_earlier_device_is_refused(fleet, device):
    """A device of an earlier version is refused."""
    (device.directory / RECEIVING_FILE).unlink()
    for use in (
        lambda: DeviceMembership(device.directory),
        lambda: enrolment.join(device.directory, grant_of(fleet), fleet.fingerprint),
    ):
        with refused(
            NotEnrolledError, "an earlier version of Shoal made it", hint="init or enrol a new one under another name"
        ):
            use()


def test_damaged_keys_are_named(device):
    write_private(device.directory / RECEIVING_FILE, b"junk")
    with pytest.raises(IntegrityError, match=RECEIVING_FILE):
        DeviceMembership(device.directory)


def test_backup_goes_on_while_its_keys_last(fleet, device, tmp_path):
    """A directory from a backup goes on while its keys last."""
    shutil.copytree(device.directory, tmp_path / "backup")
    for _ in range(2):
        fleet.rotate()
        assert device.take_grant(grant_of(fleet))
    restored = DeviceMembership(tmp_path / "backup")
    fleet.rotate()
    assert restored.take_grant(grant_of(fleet))


def test_an_aggregator_has_none(fleet, tmp_path):
    """Its grant opens nothing that devices keep from it."""
    grant = fleet.add_aggregator((tmp_path / "server" / "aggregator.card").read_bytes())
    for _ in range(2):
        member = aggregators.join(tmp_path / "server", grant.read_bytes(), fleet.fingerprint)
    assert member.receiving is None
    assert not (tmp_path / "server" / RECEIVING_FILE).exists()


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
    """A grant of somebody else erases nothing."""
    other = fleet.add_device(enrolment.init(tmp_path / "dev-2", "dev-2").read_bytes()).read_bytes()
    before = load_receiving(device.directory).public
    with pytest.raises(UntrustedError, match="is not for the keys of"):
        enrolment.join(device.directory, other, fleet.fingerprint)
    assert load_receiving(device.directory).public == before
