"""The owner's directory: members, grants and secrets, several programs at once, and crashes between their steps."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from crypto.seal.identity import Identity, fingerprint
from crypto.seal.passphrase import Lock
from shoal.errors import ConfigError, IntegrityError, NotEnrolledError, UntrustedError, UsageError
from shoal.membership.grants import AGGREGATOR_ROLE, DEVICE_ROLE, make_card, open_grant
from shoal.owner.keys.directory import GRANTS, FleetDirectory
from shoal.owner.keys.receiving import RECEIVING_FILE
from shoal.owner.keys.vault import CHANGE_FILE, ROSTER_FILE, RUNS, SECRETS_FILE
from shoal.owner.runs.plan import make_plan, write_run
from shoal.protocol.documents import AggregatorGrant
from shoal.protocol.recipe import Recipe
from shoal.util.files import exclusive, write_private
from tests.helpers.fleets import FULL_BATCH
from tests.helpers.power_cuts import PowerCut, cut
from tests.helpers.receiving import device_card, opened
from tests.helpers.refusals import refused
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle()
SPAWN = multiprocessing.get_context("spawn")
PROGRAMS = 3


OPTIONS = Recipe("fedavg", rounds=4, local=FULL_BATCH, min_contributors=1)


def sign(fleet, options=OPTIONS):
    plan = make_plan(fleet, BUNDLE, options)
    return plan, write_run(fleet, plan, BUNDLE, np.zeros((plan.origins, BUNDLE.length), np.float32))


def create(path, start):
    start.wait(60)
    try:
        print_ = FleetDirectory.create(path, "reef", "mqtt://x").fingerprint
    except ConfigError as error:
        print_ = str(error)
    (path.parent / f"said-{os.getpid()}").write_text(print_)


def test_reading_writes_nothing(fleet):
    """So `show` works on a read-only disk; the next change removes the leftovers of a killed program."""
    leftover = fleet.path / f".{SECRETS_FILE}.4194000.new"
    leftover.write_bytes(b"half")
    FleetDirectory(fleet.path)
    assert leftover.exists()
    fleet.renew()
    assert not leftover.exists()


def test_number_of_a_run_file_is_taken(fleet):
    """The file may come from a backup that is newer than the secrets."""
    (fleet.path / RUNS / "000007.run").write_bytes(b"x")
    assert sign(fleet)[0].run == 8


@pytest.mark.parametrize("name", ["backup.run", "1.run", "000001.run.old", "-00001.run"])
def test_stray_file_takes_no_number(fleet, name):
    (fleet.path / RUNS / name).write_bytes(b"x")
    assert sign(fleet)[0].run == 1
    fleet.rotate()
    fleet.revoke("dev-1")


@pytest.mark.slow
def test_one_of_several_inits_makes_fleet(tmp_path):
    """One of several inits at once makes the fleet."""
    path, start = tmp_path / "owner", SPAWN.Barrier(PROGRAMS)
    programs = [SPAWN.Process(target=create, args=(path, start)) for _ in range(PROGRAMS)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
    said = [p.read_text() for p in tmp_path.glob("said-*")]
    assert said.count(FleetDirectory(path).fingerprint) == 1
    assert sum("holds a fleet already" in text for text in said) == PROGRAMS - 1


def test_init_writes_nothing_in_a_held_place(tmp_path, monkeypatch):
    """An init writes nothing while another holds the directory."""
    monkeypatch.setattr("shoal.owner.keys.directory.CHANGE_WAIT_S", 0.1)
    path = tmp_path / "owner"
    path.mkdir()
    with exclusive(path, wait_s=0, hint="-"), pytest.raises(ConfigError, match="in use by another program"):
        FleetDirectory.create(path, "reef", "mqtt://x")
    assert {p.name for p in path.iterdir()} == {".lock"}


def test_opening_completes_a_change(fleet, devices, monkeypatch):
    """All remaining grant files have the new secrets, and the revoked device's file is removed."""
    with monkeypatch.context() as patched:
        patched.setattr(fleet, "_finish_change", cut)
        with pytest.raises(PowerCut):
            fleet.revoke("dev-1")
    again = FleetDirectory(fleet.path)
    assert again.roster.revoked == ("dev-1",)
    assert opened(again, devices["dev-2"]).version_secret == again.secrets.version_secret
    assert not (fleet.path / GRANTS / "dev-1.grant").exists()
    assert not (fleet.path / CHANGE_FILE).exists()


def test_reading_sees_a_journaled_change(fleet, monkeypatch):
    """Its program may still be writing grants."""
    before = fleet.secrets
    with monkeypatch.context() as patched:
        patched.setattr(
            "shoal.owner.keys.vault.write_private",
            lambda f, data: write_private(f, data) if f.name in (CHANGE_FILE, RECEIVING_FILE) else cut(),
        )
        with pytest.raises(PowerCut):
            fleet.rotate()
    with exclusive(fleet.path, wait_s=0, hint="-"):
        began = time.monotonic()
        seen = FleetDirectory(fleet.path)
        assert time.monotonic() - began < 5
        assert seen.secrets.broadcast_key != before.broadcast_key
        assert seen.roster.keys_since == seen.roster.sequence
        assert (fleet.path / CHANGE_FILE).exists()
    assert FleetDirectory(fleet.path).secrets == seen.secrets
    assert not (fleet.path / CHANGE_FILE).exists()


def test_run_number_is_never_allocated_twice(fleet):
    """Also if its file was moved to the aggregator, or never written."""
    first, path = sign(fleet)
    path.unlink()
    make_plan(fleet, BUNDLE, OPTIONS)
    third, _ = sign(FleetDirectory(fleet.path))
    assert (first.run, third.run) == (1, 3)


def test_cut_file_under_passphrase_is_named(tmp_path):
    """A file under a passphrase that was cut off is named."""
    path, lock = tmp_path / "owner", Lock(b"correct horse battery")
    FleetDirectory.create(path, "reef", "mqtt://x", lock)
    write_private(path / SECRETS_FILE, (path / SECRETS_FILE).read_bytes()[:40])
    with pytest.raises(IntegrityError, match=f"{SECRETS_FILE} is damaged"):
        FleetDirectory(path, lock)


@pytest.mark.parametrize("file", [SECRETS_FILE, ROSTER_FILE, CHANGE_FILE])
@pytest.mark.parametrize("cut_to", [0, 60])
def test_damaged_file_says_what_to_do(fleet, file, cut_to):
    """A damaged file is named with what to do."""
    path: Path = fleet.path / file
    data = path.read_bytes() if path.exists() else b"junk" * 40
    write_private(path, data[:cut_to])
    with refused(IntegrityError, f"{file} is damaged", hint="backup"):
        FleetDirectory(fleet.path)


def reopened(fleet):
    return FleetDirectory(fleet.path)


def test_no_fleet_says_how_to_make_one(tmp_path):
    with refused(NotEnrolledError, "holds no fleet", hint_is="shoal-fleet init DIR --name NAME --broker URL"):
        FleetDirectory(tmp_path)


def test_new_fleet_has_an_empty_roster(tmp_path):
    """A new fleet has an empty roster of a year and secrets of its own."""
    began = int(time.time())
    one, other = (FleetDirectory.create(tmp_path / name, "reef", "mqtt://user:word@h:1884") for name in "ab")
    assert (one.name, one.broker) == ("reef", "mqtt://h:1884")
    assert (one.roster.sequence, one.roster.devices, one.roster.aggregator) == (1, (), None)
    assert began <= one.roster.issued_at_s == one.roster.expires_at_s - 365 * 24 * 3600
    drawn = [getattr(fleet.secrets, name) for fleet in (one, other) for name in ("version_secret", "broadcast_key")]
    assert len(set(drawn)) == 4
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("name", "broker", "message"),
    [
        ("Reef", "mqtt://h", "fleet 'Reef' is not a valid name"),
        ("reef", "http://h", "the broker's URL begins neither"),
    ],
)
def test_invalid_name_leaves_no_directory(tmp_path, name, broker, message):
    """A fleet with an invalid name or address leaves no directory."""
    with pytest.raises(ConfigError, match=message):
        FleetDirectory.create(tmp_path / "owner", name, broker)
    assert not (tmp_path / "owner").exists()


def test_device_added_again_has_its_grant(fleet, devices):
    """A device that is added again gets its grant again and no new roster."""
    before, card = fleet.roster, device_card(devices["dev-1"])
    path = fleet.add_device(card, fingerprint(devices["dev-1"].member).upper() + " ")
    assert path == fleet.path / GRANTS / "dev-1.grant"
    assert fleet.roster == reopened(fleet).roster == before
    grant = opened(fleet, devices["dev-1"])
    assert grant.roster == fleet.roster_bytes
    assert grant.version_secret == fleet.secrets.version_secret


def newcomer(name, role=DEVICE_ROLE):
    identity = Identity.generate(name)
    return device_card(identity) if role == DEVICE_ROLE else make_card(identity, role)


@pytest.mark.parametrize(
    ("card", "error", "message", "hint"),
    [
        (newcomer("dev-1"), ConfigError, "has had another device called 'dev-1'", "another name"),
        (newcomer("owner"), ConfigError, "can't be called 'owner'", "another name"),
        (newcomer("enrol"), ConfigError, "can't be called 'enrol'", "another name"),
        (newcomer("aggregator"), ConfigError, "can't be called 'aggregator'", "another name"),
        (newcomer("dev-3", AGGREGATOR_ROLE), UntrustedError, "asks to be 'aggregator', not 'device'", "add-aggregator"),
    ],
)
def test_unfit_card_changes_nothing(fleet, card, error, message, hint):
    """A card that can't become a device changes nothing."""
    before = fleet.roster
    with refused(error, message, hint=hint):
        fleet.add_device(card)
    assert reopened(fleet).roster == before
    assert {p.stem for p in (fleet.path / GRANTS).iterdir()} == {"aggregator", "dev-1", "dev-2"}


def test_another_fingerprint_is_refused(fleet, devices):
    """The person at the device read theirs aloud."""
    with pytest.raises(UntrustedError, match=r"this card has fingerprint .*, not aaaa-bbbb"):
        fleet.add_device(newcomer("dev-3"), "aaaa-bbbb")
    assert reopened(fleet).roster.device("dev-3") is None


def test_devices_come_after_the_aggregator(tmp_path):
    """Devices come after the aggregator whose keys they pin."""
    empty = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    with refused(ConfigError, "no aggregator yet", hint_is="shoal-fleet add-aggregator first"):
        empty.add_device(newcomer("dev-1"))


def test_a_fleet_has_one_aggregator_for_good(fleet):
    named = fleet.roster.aggregator
    with refused(ConfigError, f"has an aggregator already .{fingerprint(named)}.", hint="replace-aggregator"):
        fleet.add_aggregator(newcomer("aggregator", AGGREGATOR_ROLE))
    with pytest.raises(ConfigError, match="an aggregator can't be called 'owner'"):
        fleet.add_aggregator(newcomer("owner", AGGREGATOR_ROLE))
    assert reopened(fleet).roster.aggregator == named


def test_renewing_changes_dates_alone(fleet):
    """Renewing changes the dates and the sequence alone."""
    before, secrets = fleet.roster, fleet.secrets
    fleet.renew()
    after = reopened(fleet)
    changed = {"sequence": before.sequence, "issued_at_s": before.issued_at_s, "expires_at_s": before.expires_at_s}
    assert after.roster.sequence == before.sequence + 1
    assert dataclasses.replace(after.roster, **changed) == before
    assert after.secrets == secrets


@pytest.mark.parametrize("name", ["aggregator", "harbour"])
def test_aggregator_is_replaced_for_good(fleet, devices, name):
    """An aggregator is replaced for good under new secrets."""
    before, old = fleet.secrets, fleet.roster
    card = newcomer(name, AGGREGATOR_ROLE)
    path = fleet.replace_aggregator(card)
    after = reopened(fleet)
    assert (path.stem, after.roster.aggregator.name) == (name, name)
    assert after.roster.keys_since == after.roster.sequence == old.sequence + 1
    assert (after.roster.devices, after.roster.revoked) == (old.devices, old.revoked)
    assert after.secrets.broadcast_key != before.broadcast_key
    assert opened(after, devices["dev-2"]).version_secret == after.secrets.version_secret
    assert [grant.stem for grant in sorted((fleet.path / GRANTS).iterdir())] == sorted(["dev-1", "dev-2", name])
    assert after.replace_aggregator(card) == path
    assert reopened(fleet).roster == after.roster


def test_replaced_aggregator_stays_away(fleet):
    """No aggregator that was replaced comes back."""
    cards = [newcomer("aggregator", AGGREGATOR_ROLE) for _ in range(2)]
    for card in cards:
        fleet.replace_aggregator(card)
    before = fleet.roster
    with refused(UntrustedError, "was replaced before", hint="shoal-aggregator init"):
        fleet.replace_aggregator(cards[0])
    with pytest.raises(ConfigError, match="another party of the fleet is called 'dev-1'"):
        fleet.replace_aggregator(newcomer("dev-1", AGGREGATOR_ROLE))
    assert reopened(fleet).roster == before


def test_no_aggregator_none_to_replace(tmp_path):
    """A fleet without an aggregator has none to replace."""
    made = FleetDirectory.create(tmp_path / "empty", "reef", "mqtt://h")
    with refused(ConfigError, "no aggregator yet", hint="add-aggregator"):
        made.replace_aggregator(newcomer("aggregator", AGGREGATOR_ROLE))


def test_aggregators_grant_has_no_secret(tmp_path):
    """The aggregators grant has no secret of devices."""
    aggregator = Identity.generate("aggregator")
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    path = made.add_aggregator(make_card(aggregator, AGGREGATOR_ROLE))
    grant = open_grant(aggregator, path.read_bytes(), AggregatorGrant, made.fingerprint)
    assert grant.broadcast_key == made.secrets.broadcast_key
    assert made.secrets.version_secret not in dataclasses.astuple(grant)


def test_revocation_draws_all_secrets(fleet, devices):
    """A revocation draws all secrets and is for good."""
    before = fleet.secrets
    fleet.revoke("dev-1")
    after = reopened(fleet)
    for name in ("version_secret", "broadcast_key"):
        assert getattr(after.secrets, name) != getattr(before, name)
    assert after.roster.keys_since == after.roster.sequence
    assert not (fleet.path / GRANTS / "dev-1.grant").exists()
    assert opened(after, devices["dev-2"]).version_secret == after.secrets.version_secret
    assert [card.member.name for card in after.cards()] == ["aggregator", "dev-2"]
    assert not after.listed(devices["dev-1"].member)
    with pytest.raises(ConfigError, match="another device called 'dev-1'"):
        fleet.add_device(device_card(devices["dev-1"]))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("dev-9", UsageError, "'dev-9' is not in the roster"), ("dev-1", ConfigError, "'dev-1' is revoked already")],
)
def test_impossible_revocation_draws_nothing(fleet, name, kind, message):
    """A revocation that can't be draws no secrets."""
    fleet.revoke("dev-1")
    before = fleet.secrets
    with refused(kind, message, hint_is="shoal-fleet show lists the devices"):
        fleet.revoke(name)
    assert reopened(fleet).secrets == before


def test_another_owners_roster_is_damage(fleet, tmp_path):
    """A roster of another owner in the directory is damage."""
    other = FleetDirectory.create(tmp_path / "other", "reef", "mqtt://h")
    write_private(fleet.path / ROSTER_FILE, other.roster_bytes)
    with pytest.raises(IntegrityError, match=f"{ROSTER_FILE} is damaged"):
        reopened(fleet)
