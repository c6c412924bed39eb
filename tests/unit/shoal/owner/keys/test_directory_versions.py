"""The owner's directory stores the secrets of earlier key versions as long as a run may have ended under them."""

import shutil

import pytest

from crypto.seal.identity import Identity
from shoal.errors import IntegrityError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import VERSIONS_FILE
from tests.helpers.power_cuts import cut_at
from tests.helpers.receiving import device_card

CARD = device_card(Identity.generate("dev-1"))


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://x")
    made.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    made.add_device(CARD)
    return made


def numbers(fleet):
    return [version.number for version in fleet.versions]


def test_only_the_newest_before_a_run(fleet):
    """Before the first run only the newest is there."""
    fleet.rotate()
    assert numbers(fleet) == [fleet.roster.keys_since]
    assert not (fleet.path / VERSIONS_FILE).exists()


def test_draw_stores_what_it_replaces(fleet):
    """Each draw after a run stores what it replaces."""
    fleet.take_run()
    before, first = fleet.roster.keys_since, fleet.secrets
    fleet.rotate()
    second = fleet.roster.keys_since
    fleet.revoke("dev-1")
    assert numbers(fleet) == [fleet.roster.keys_since, second, before]
    oldest = FleetDirectory(fleet.path).versions[-1]
    assert (oldest.version_secret, oldest.broadcast_key) == (first.version_secret, first.broadcast_key)
    assert (fleet.path / VERSIONS_FILE).stat().st_mode & 0o777 == 0o600


def test_forgotten_versions_are_erased(fleet):
    """Forgotten versions are erased and the newest stays."""
    fleet.take_run()
    fleet.rotate()
    kept = fleet.roster.keys_since
    fleet.rotate()
    fleet.forget_versions_before(kept)
    assert numbers(FleetDirectory(fleet.path)) == [fleet.roster.keys_since, kept]
    fleet.forget_versions_before(fleet.roster.keys_since + 5)
    assert numbers(fleet) == [fleet.roster.keys_since]


def test_power_cut_loses_no_replaced_secret(fleet, tmp_path):
    """No power cut loses the secrets that a draw replaces."""
    fleet.take_run()
    old, finished, cuts = fleet.versions[0], False, 0
    while not finished:
        path = tmp_path / f"copy-{cuts}"
        shutil.copytree(fleet.path, path)
        finished = cut_at(cuts, lambda folder: FleetDirectory(folder).rotate(), path)
        cuts += 1
        found = {version.number: version for version in FleetDirectory(path).versions}
        assert found[old.number] == old
    assert cuts > 5


def test_a_damaged_file_is_named(fleet):
    fleet.take_run()
    fleet.rotate()
    path = fleet.path / VERSIONS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"versions\.bin is damaged"):
        fleet.versions  # noqa: B018 - the property reads the file
