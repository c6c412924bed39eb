"""Admission after a run: one draw for all new devices, and no crash parts roster, secrets and receiving keys."""

from __future__ import annotations

import shutil

import pytest

from crypto.mask.schedule import VersionKey
from crypto.seal.identity import Identity
from edge_client import membership as devices
from shoal.errors import ConfigError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card
from shoal.owner.keys.directory import FleetDirectory
from tests.helpers.power_cuts import cut_at
from tests.helpers.receiving import device_card

CARDS = {name: device_card(Identity.generate(name)) for name in ("dev-1", "dev-2", "dev-3")}


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://x")
    made.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    made.add_device(CARDS["dev-1"])
    return made


@pytest.fixture
def trained(fleet):
    """The fleet after its first run."""
    fleet.take_run()
    return fleet


def drawn(secrets):
    return {secrets.broadcast_key, secrets.version_secret}


def numbers(fleet):
    """Return the number of each device's receiving key to which the newest secrets are sealed."""
    return {name: fleet.receiving.of(name).number for name in fleet.roster.active()}


def test_before_first_run_nothing_is_drawn(fleet):
    before = fleet.secrets
    fleet.add_devices([CARDS["dev-2"], CARDS["dev-3"]])
    assert fleet.secrets == before
    assert (fleet.roster.keys_since, numbers(fleet)) == (0, dict.fromkeys(CARDS, 1))


def test_admission_draws_every_secret_once(trained):
    before, sequence = trained.secrets, trained.roster.sequence
    trained.add_device(CARDS["dev-2"])
    again = FleetDirectory(trained.path)
    assert not drawn(before) & drawn(again.secrets)
    assert (again.roster.sequence, again.roster.keys_since) == (sequence + 1, sequence + 1)
    assert again.secrets.next_run == before.next_run
    assert again.roster.active() == ("dev-1", "dev-2")
    assert numbers(again) == {"dev-1": 2, "dev-2": 1}, "a newcomer's first key is for these secrets"


def test_many_devices_share_one_draw(trained):
    sequence = trained.roster.sequence
    trained.add_devices([CARDS["dev-2"], CARDS["dev-3"]])
    assert (trained.roster.sequence, trained.roster.keys_since) == (sequence + 1, sequence + 1)
    assert numbers(trained) == {"dev-1": 2, "dev-2": 1, "dev-3": 1}
    after = trained.secrets
    for name in ("dev-2", "dev-3"):
        trained.add_device(CARDS[name])
    assert FleetDirectory(trained.path).secrets == after, "they are listed: only their grants are written"


def test_listed_device_gets_secrets_again(trained):
    """A device that is listed gets the newest secrets again."""
    before, roster = trained.secrets, trained.roster
    trained.add_device(CARDS["dev-1"])
    assert (trained.secrets, trained.roster) == (before, roster)


def test_refused_admission_draws_nothing(trained):
    """An admission that is refused draws nothing."""
    before = trained.secrets
    with pytest.raises(ConfigError):
        trained.add_devices([CARDS["dev-2"], device_card(Identity.generate("dev-1"))])
    with pytest.raises(ConfigError):
        trained.add_device(device_card(Identity.generate("dev-1")))
    assert FleetDirectory(trained.path).secrets == before


@pytest.mark.parametrize(
    "draw",
    [
        FleetDirectory.rotate,
        lambda fleet: fleet.revoke("dev-1"),
        lambda fleet: fleet.sign_beyond(40),
        lambda fleet: fleet.add_device(CARDS["dev-2"]),
    ],
    ids=["rotate", "revoke", "restore", "admission"],
)
def test_each_draw_makes_a_key_version(trained, draw):
    """Each draw makes a key version that begins at run 1."""
    before = trained.version_key
    draw(trained)
    key = FleetDirectory(trained.path).version_key
    assert (key.fleet, key.number, key.next_run) == ("reef", trained.roster.keys_since, 1)
    assert key.number > before.number
    assert key.reveal() != before.reveal()
    assert trained.admission_draws


def test_the_owner_keeps_the_secret_as_drawn(trained):
    """Whatever runs follow, it opens the checkpoints of every run under this version."""
    key = trained.version_key
    trained.take_run()
    again = FleetDirectory(trained.path).version_key
    assert (again.next_run, again.reveal()) == (1, key.reveal())


def test_grant_has_the_newest_version_alone(trained, tmp_path):
    """A newcomer derives the keys that the others derive from it, and no key of an earlier version."""
    old = trained.version_key
    card = devices.init(tmp_path / "dev-9", "dev-9").read_bytes()
    member = devices.join(tmp_path / "dev-9", trained.add_device(card).read_bytes(), trained.fingerprint)
    owners, own = trained.version_key, member.version_key(trained.roster.keys_since)
    for key in (owners, own):
        key.skip_to_run(5)
    assert own.begin_run(b"run").take().content == owners.begin_run(b"run").take().content
    assert old.reveal() not in b"".join(p.read_bytes() for p in member.directory.iterdir() if p.is_file())


def test_others_grants_have_the_new_secrets(tmp_path, fleet):
    """Grant files of the others hold the new secrets."""
    card = devices.init(tmp_path / "dev-9", "dev-9").read_bytes()
    path = fleet.add_device(card)
    member = devices.join(tmp_path / "dev-9", path.read_bytes(), fleet.fingerprint)
    fleet.take_run()
    fleet.add_device(CARDS["dev-2"])
    assert member.take_grant(path.read_bytes())
    assert member.next.version_secret == fleet.secrets.version_secret


def add_two(path):
    FleetDirectory(path).add_devices([CARDS["dev-2"], CARDS["dev-3"]])


@pytest.mark.slow
def test_power_cut_at_any_write(trained, tmp_path):
    """The newcomers are listed exactly where the secrets are new, and everybody listed can be sealed to."""
    old, began, finished, cuts = trained.secrets, 0, False, 0
    while not finished:
        path = tmp_path / f"copy-{cuts}"
        shutil.copytree(trained.path, path)
        finished = cut_at(cuts, add_two, path)
        cuts += 1
        fleet = FleetDirectory(path)
        new = len(fleet.roster.active()) == 3
        began += new
        assert new is (not drawn(old) & drawn(fleet.secrets)) is (fleet.roster.keys_since == fleet.roster.sequence)
        with fleet.changing():
            assert all(fleet.grant_for(card, renewal=True) for card in fleet.cards())
        if not new:
            assert drawn(old) == drawn(fleet.secrets)
            add_two(path)
        fleet = FleetDirectory(path)
        assert fleet.roster.active() == ("dev-1", "dev-2", "dev-3")
        assert fleet.version_key.number == fleet.roster.sequence == trained.roster.sequence + 1
        assert not fleet._vault.is_changing
    assert 0 < began < cuts > 10


def test_no_secret_is_in_a_repr(trained):
    secret = trained.secrets.version_secret
    shown = repr(trained.secrets) + repr(trained.version_key) + repr(VersionKey.draw("reef", 1))
    assert repr(secret) not in shown
    assert secret.hex() not in shown
