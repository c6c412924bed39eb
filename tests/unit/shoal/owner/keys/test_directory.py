"""The owner's directory: members, grants and secrets, several programs at once, and crashes between their steps."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from aggregator import membership as aggregators
from crypto.mask.masking import mask
from crypto.seal.identity import Identity, fingerprint
from crypto.seal.passphrase import Lock
from edge_client import membership as enrolment
from shoal.errors import ConfigError, IntegrityError, NotEnrolledError, UntrustedError, UsageError
from shoal.membership.grants import AGGREGATOR_ROLE, DEVICE_ROLE, make_card, open_grant
from shoal.owner.keys.directory import GRANTS, LOCKED_HINT, FleetDirectory
from shoal.owner.keys.receiving import RECEIVING_FILE
from shoal.owner.keys.vault import CHANGE_FILE, ROSTER_FILE, RUNS, SECRETS_FILE, VERSIONS_FILE, Change
from shoal.owner.runs.plan import make_plan, round_mask, write_run
from shoal.protocol.codec import encode
from shoal.protocol.documents import AggregatorGrant
from shoal.protocol.recipe import Recipe
from shoal.util.files import exclusive, write_private
from tests.helpers.fleets import FULL_BATCH
from tests.helpers.power_cuts import PowerCut, cut, cut_at
from tests.helpers.processes import run_at_once
from tests.helpers.receiving import device_card, opened
from tests.helpers.refusals import refused
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle()
PROGRAMS = 3


OPTIONS = Recipe("fedavg", rounds=4, local=FULL_BATCH, min_contributors=1)


def sign(fleet, options=OPTIONS):
    plan = make_plan(fleet, BUNDLE, options)
    return plan, write_run(fleet, plan, BUNDLE, np.zeros((plan.origins, BUNDLE.length), np.float32))


def create(path, program, start):
    start.wait(60)
    try:
        print_ = FleetDirectory.create(path, "reef", "mqtt://x").fingerprint
    except ConfigError as error:
        print_ = str(error)
    (path.parent / f"said-{program}").write_text(print_)


def test_reading_writes_nothing(fleet):
    """So `show` works on a read-only disk; the next change removes the leftovers of a killed program."""
    leftover = fleet.path / f".{SECRETS_FILE}.4194000.new"
    leftover.write_bytes(b"half")
    FleetDirectory(fleet.path)
    assert leftover.exists()
    fleet.renew()
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["backup.run", "1.run", "000001.run.old", "-00001.run"])
def test_stray_file_takes_no_number(fleet, name):
    (fleet.path / RUNS / name).write_bytes(b"x")
    assert sign(fleet)[0].run == 1
    fleet.rotate()
    fleet.revoke("dev-1")


@pytest.mark.slow
def test_one_of_several_inits_makes_fleet(tmp_path):
    """One of several inits at once makes the fleet."""
    path = tmp_path / "owner"
    run_at_once(create, *((path, n) for n in range(PROGRAMS)))
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
    """Also if its file was moved to the aggregator, or never written, or comes from a backup that is newer than the secrets."""
    first, path = sign(fleet)
    path.unlink()
    make_plan(fleet, BUNDLE, OPTIONS)
    third, _ = sign(reopened(fleet))
    (fleet.path / RUNS / "000007.run").write_bytes(b"x")
    assert (first.run, third.run, sign(fleet)[0].run) == (1, 3, 8)


def test_cut_file_under_passphrase_is_named(tmp_path):
    """And so is a roster of another owner."""
    path, lock = tmp_path / "owner", Lock(b"correct horse battery")
    whole = FleetDirectory.create(path, "reef", "mqtt://x", lock)
    write_private(path / ROSTER_FILE, FleetDirectory.create(tmp_path / "other", "reef", "mqtt://h").roster_bytes)
    with pytest.raises(IntegrityError, match=f"{ROSTER_FILE} is damaged"):
        FleetDirectory(path, lock)
    write_private(path / ROSTER_FILE, whole.roster_bytes)
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
    with refused(NotEnrolledError, "holds no fleet", hint_is="shoal-fleet init DIR --name NAME --broker URL"):
        FleetDirectory(tmp_path / "owner")
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
    """They pin its keys. Without one there is none to replace; its own grant has no secret of devices."""
    empty = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    with refused(ConfigError, "no aggregator yet", hint_is="shoal-fleet add-aggregator first"):
        empty.add_device(newcomer("dev-1"))
    with refused(ConfigError, "no aggregator yet", hint="add-aggregator"):
        empty.replace_aggregator(newcomer("aggregator", AGGREGATOR_ROLE))
    aggregator = Identity.generate("aggregator")
    path = empty.add_aggregator(make_card(aggregator, AGGREGATOR_ROLE))
    grant = open_grant(aggregator, path.read_bytes(), AggregatorGrant, empty.fingerprint)
    assert grant.broadcast_key == empty.secrets.broadcast_key
    assert empty.secrets.version_secret not in dataclasses.astuple(grant)


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


# -- Secrets and run numbers: none is used twice, and a crash or a second program loses nothing --


PERMUTED = Recipe("fedavg", mode="permutation", local=FULL_BATCH, min_contributors=1)


@pytest.fixture
def joinable(tmp_path):
    """A fleet whose aggregator and devices have directories."""
    made = FleetDirectory.create(tmp_path / "owner", "demo", "mqtt://loopback")
    made.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    for name in ("dev-1", "dev-2"):
        made.add_device(enrolment.init(tmp_path / name, name).read_bytes())
    return made


def drawn(secrets):
    return {secrets.broadcast_key, secrets.version_secret}


def test_a_restored_owner_repeats_no_mask(fleet, tmp_path):
    """A backup gives the run number a second time, under the same key version; the run id still separates the masks."""
    shutil.copytree(fleet.path, tmp_path / "backup")
    plans = []
    for owner in (fleet, FleetDirectory(tmp_path / "backup")):
        plan = make_plan(owner, BUNDLE, PERMUTED)
        ramp = np.arange(BUNDLE.length, dtype=np.float32)
        plans.append((plan, [mask(ramp, round_mask(owner, plan, round_)).values.tolist() for round_ in (1, 2)]))
    (first, one), (second, other) = plans
    assert (first.run, first.key_version) == (second.run, second.key_version)
    assert all(sorted(m) == sorted(one[0]) for m in one + other)
    assert len({tuple(m) for m in one + other}) == 4


def test_rotation_renews_everybodys_grant(joinable, tmp_path):
    """It draws every secret and keeps the run numbers."""
    fleet = joinable
    fleet.take_run()
    before, old = fleet.secrets, {p.name: p.read_bytes() for p in (fleet.path / "grants").iterdir()}
    fleet.rotate()
    after, new = fleet.secrets, {p.name: p.read_bytes() for p in (fleet.path / "grants").iterdir()}
    assert old.keys() == new.keys()
    assert [name for name in old if old[name] == new[name]] == []
    member = enrolment.join(tmp_path / "dev-1", new["dev-1.grant"], fleet.fingerprint)
    assert (member.grant.version_secret, member.grant.keys_since) == (after.version_secret, fleet.roster.keys_since)
    assert drawn(before).isdisjoint(drawn(after))
    assert (
        dataclasses.replace(after, broadcast_key=before.broadcast_key, version_secret=before.version_secret) == before
    )
    assert fleet.roster.keys_since == fleet.roster.sequence
    assert fleet.roster.revoked == ()


@pytest.mark.parametrize("half", [False, True], ids=["before either file", "between the files"])
def test_a_rotation_is_whole_or_not_at_all(fleet, half):
    """The journal of a crash is carried out when the directory is opened again: secrets and roster belong together."""
    files = [fleet.path / SECRETS_FILE, fleet.path / ROSTER_FILE]
    old = [f.read_bytes() for f in files]
    fleet.rotate()
    new = [f.read_bytes() for f in files]
    files[0].write_bytes(new[0] if half else old[0])
    files[1].write_bytes(old[1])
    write_private(fleet.path / CHANGE_FILE, encode(Change(*new)))
    again = reopened(fleet)
    assert [f.read_bytes() for f in files] == new
    assert not (fleet.path / CHANGE_FILE).exists()
    assert (again.secrets, again.roster.keys_since) == (fleet.secrets, fleet.roster.keys_since)
    assert make_plan(again, BUNDLE, PERMUTED).key_version == fleet.roster.keys_since


@pytest.mark.parametrize(
    "late",
    [lambda f: f.take_run(), lambda f: f.rotate(), lambda f: f.revoke("dev-2")],
    ids=["take_run", "rotate", "revoke"],
)
def test_two_programs_undo_nothing(fleet, late):
    """Old secrets over new ones, under the new roster, would cut every later device off."""
    fleet.take_run()
    FleetDirectory(fleet.path).rotate()
    fresh = reopened(fleet)
    late(fleet)
    again = reopened(fleet)
    assert (again.secrets, again.roster) == (fleet.secrets, fleet.roster)
    assert again.roster.sequence >= fresh.roster.sequence
    assert again.secrets.next_run >= fresh.secrets.next_run
    if again.roster.sequence == fresh.roster.sequence:
        assert drawn(again.secrets) == drawn(fresh.secrets)
    else:
        assert again.roster.keys_since == again.roster.sequence


# -- Secrets of earlier key versions, as long as a run may have ended under them --


def versions(fleet):
    return [version.number for version in fleet.versions]


def test_draw_stores_what_it_replaces(fleet):
    """Before the first run only the newest is there; forgotten versions are erased and the newest stays."""
    fleet.rotate()
    assert versions(fleet) == [fleet.roster.keys_since]
    assert not (fleet.path / VERSIONS_FILE).exists()
    fleet.take_run()
    before, first = fleet.roster.keys_since, fleet.secrets
    fleet.rotate()
    second = fleet.roster.keys_since
    fleet.revoke("dev-1")
    assert versions(fleet) == [fleet.roster.keys_since, second, before]
    oldest = reopened(fleet).versions[-1]
    assert (oldest.version_secret, oldest.broadcast_key) == (first.version_secret, first.broadcast_key)
    assert (fleet.path / VERSIONS_FILE).stat().st_mode & 0o777 == 0o600
    fleet.forget_versions_before(second)
    assert versions(reopened(fleet)) == [fleet.roster.keys_since, second]
    fleet.forget_versions_before(fleet.roster.keys_since + 5)
    assert versions(fleet) == [fleet.roster.keys_since]


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


def test_damaged_versions_are_named(fleet):
    fleet.take_run()
    fleet.rotate()
    path = fleet.path / VERSIONS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"versions\.bin is damaged"):
        fleet.versions  # noqa: B018 - the property reads the file


# -- Admission after a run: one draw for all new devices, and no crash parts roster, secrets and receiving keys --


CARDS = {name: device_card(Identity.generate(name)) for name in ("dev-3", "dev-4")}


@pytest.fixture
def trained(fleet):
    """The fleet after its first run."""
    fleet.take_run()
    return fleet


def numbers(fleet):
    """Return the number of each device's receiving key to which the newest secrets are sealed."""
    return {name: fleet.receiving.of(name).number for name in fleet.roster.active()}


def test_before_first_run_nothing_is_drawn(fleet):
    before, sequence = fleet.secrets, fleet.roster.sequence
    fleet.add_devices([*CARDS.values()])
    assert fleet.secrets == before
    assert (fleet.roster.keys_since, fleet.roster.sequence) == (0, sequence + 1)
    assert numbers(fleet) == dict.fromkeys(("dev-1", "dev-2", "dev-3", "dev-4"), 1)
    assert reopened(fleet).roster == fleet.roster


def test_many_devices_share_one_draw(trained, devices):
    """One draw of every secret, which a listed device gets again."""
    before, sequence = trained.secrets, trained.roster.sequence
    trained.add_devices([*CARDS.values()])
    again = reopened(trained)
    assert not drawn(before) & drawn(again.secrets)
    assert again.secrets.next_run == before.next_run
    assert again.roster.active() == ("dev-1", "dev-2", "dev-3", "dev-4")
    assert numbers(again) == {"dev-1": 2, "dev-2": 2, "dev-3": 1, "dev-4": 1}, (
        "a newcomer's first key is for these secrets"
    )
    for card in (*CARDS.values(), device_card(devices["dev-1"])):
        trained.add_device(card)
    assert (trained.roster.sequence, trained.roster.keys_since) == (sequence + 1, sequence + 1)
    assert reopened(trained).secrets == again.secrets, "they are listed: only their grants are written"


@pytest.mark.parametrize("name", ["dev-1", "dev-3", "owner"])
def test_one_refused_card_admits_nobody(trained, name):
    """Of many devices none joins, and nothing is drawn."""
    before = reopened(trained)
    with pytest.raises(ConfigError):
        trained.add_devices([CARDS["dev-3"], newcomer(name)])
    after = reopened(trained)
    assert (after.roster, after.secrets) == (before.roster, before.secrets)


@pytest.mark.parametrize(
    "draw",
    [
        FleetDirectory.rotate,
        lambda fleet: fleet.revoke("dev-1"),
        lambda fleet: fleet.sign_beyond(40),
        lambda fleet: fleet.add_device(CARDS["dev-3"]),
    ],
    ids=["rotate", "revoke", "restore", "admission"],
)
def test_each_draw_makes_a_key_version(trained, draw):
    """It begins at run 1, and the owner keeps its secret as drawn, whatever runs follow: it opens their checkpoints."""
    before = trained.version_key
    draw(trained)
    key = reopened(trained).version_key
    assert (key.fleet, key.number, key.next_run) == ("reef", trained.roster.keys_since, 1)
    assert key.number > before.number
    assert key.reveal() != before.reveal()
    assert trained.admission_draws
    trained.take_run()
    again = reopened(trained).version_key
    assert (again.next_run, again.reveal()) == (1, key.reveal())


def test_grant_has_the_newest_version_alone(trained, tmp_path):
    """A newcomer derives the keys that the others derive from it, and no key of an earlier version; so after the next draw."""
    old = trained.version_key
    card = enrolment.init(tmp_path / "dev-9", "dev-9").read_bytes()
    path = trained.add_device(card)
    member = enrolment.join(tmp_path / "dev-9", path.read_bytes(), trained.fingerprint)
    owners, own = trained.version_key, member.version_key(trained.roster.keys_since)
    for key in (owners, own):
        key.skip_to_run(5)
    assert own.begin_run(b"run").take().content == owners.begin_run(b"run").take().content
    assert old.reveal() not in b"".join(p.read_bytes() for p in member.directory.iterdir() if p.is_file())
    trained.take_run()
    trained.add_device(CARDS["dev-3"])
    assert member.take_grant(path.read_bytes())
    assert member.next.version_secret == trained.secrets.version_secret


def add_two(path):
    FleetDirectory(path).add_devices([*CARDS.values()])


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
        new = len(fleet.roster.active()) == 4
        began += new
        assert new is (not drawn(old) & drawn(fleet.secrets)) is (fleet.roster.keys_since == fleet.roster.sequence)
        with fleet.changing():
            assert all(fleet.grant_for(card, renewal=True) for card in fleet.cards())
        if not new:
            assert drawn(old) == drawn(fleet.secrets)
            add_two(path)
        fleet = FleetDirectory(path)
        assert fleet.roster.active() == ("dev-1", "dev-2", "dev-3", "dev-4")
        assert fleet.version_key.number == fleet.roster.sequence == trained.roster.sequence + 1
        assert not fleet._vault.is_changing
    assert 0 < began < cuts > 10


# -- Several of the owner's programs at once: each one's change is in the roster that the last one signs --


DEVICES_EACH = 3


def add_some(path, program, start):
    fleet = FleetDirectory(path)
    start.wait(60)
    for number in range(DEVICES_EACH):
        fleet.add_device(device_card(Identity.generate(f"dev-{program}-{number}")))


@pytest.mark.slow
def test_several_programs_add_devices(fleet):
    """Devices that several programs add at once are all in the roster."""
    before = fleet.roster
    run_at_once(add_some, *((fleet.path, n) for n in range(PROGRAMS)))
    roster = reopened(fleet).roster
    added = {f"dev-{p}-{n}" for p in range(PROGRAMS) for n in range(DEVICES_EACH)}
    assert {d.name for d in roster.devices} == added | {"dev-1", "dev-2"}
    assert roster.sequence == before.sequence + PROGRAMS * DEVICES_EACH


def test_ever_changing_fleet_is_left_alone(fleet, monkeypatch):
    """A fleet that another program keeps changing is left alone; a change inside a change needs no second lock."""
    monkeypatch.setattr("shoal.owner.keys.directory.CHANGE_WAIT_S", 0.1)
    with exclusive(fleet.path, wait_s=0, hint="-"):
        with refused(ConfigError, "in use by another program", hint_is=LOCKED_HINT):
            fleet.take_run()
        assert reopened(fleet).roster == fleet.roster  # looking is free
    with fleet.changing():
        run = fleet.take_run()
        assert fleet.take_run() == run + 1
    assert reopened(fleet).secrets.next_run == run + 2, "a crash right after leaves a gap, never a number twice"
