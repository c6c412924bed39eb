"""Secrets and run numbers of the owner's directory: none is used twice, and a crash or a second program loses nothing."""

import dataclasses
import shutil

import numpy as np
import pytest

from aggregator import membership as aggregators
from crypto.mask.masking import mask
from edge_client import membership as enrolment
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import CHANGE_FILE, ROSTER_FILE, SECRETS_FILE, Change
from shoal.owner.runs.plan import make_plan, round_mask
from shoal.protocol.codec import encode
from shoal.protocol.recipe import Recipe
from tests.helpers.fleets import FULL_BATCH
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle()
OPTIONS = Recipe("fedavg", mode="permutation", local=FULL_BATCH, min_contributors=1)


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "demo", "mqtt://loopback")
    made.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    for name in ("dev-1", "dev-2", "dev-3"):
        made.add_device(enrolment.init(tmp_path / name, name).read_bytes())
    return made


def drawn(secrets):
    return {secrets.broadcast_key, secrets.version_secret}


def test_a_restored_owner_repeats_no_mask(fleet, tmp_path):
    """A backup gives the run number a second time, under the same key version; the run id still separates the masks."""
    shutil.copytree(fleet.path, tmp_path / "backup")
    plans = []
    for owner in (fleet, FleetDirectory(tmp_path / "backup")):
        plan = make_plan(owner, BUNDLE, OPTIONS)
        ramp = np.arange(BUNDLE.length, dtype=np.float32)
        plans.append((plan, [mask(ramp, round_mask(owner, plan, round_)).values.tolist() for round_ in (1, 2)]))
    (first, one), (second, other) = plans
    assert (first.run, first.key_version) == (second.run, second.key_version)
    assert all(sorted(m) == sorted(one[0]) for m in one + other)
    assert len({tuple(m) for m in one + other}) == 4


def test_rotation_renews_everybodys_grant(fleet, tmp_path):
    old = {p.name: p.read_bytes() for p in (fleet.path / "grants").iterdir()}
    fleet.rotate()
    new = {p.name: p.read_bytes() for p in (fleet.path / "grants").iterdir()}
    assert old.keys() == new.keys()
    assert all(old[name] != new[name] for name in old)
    member = enrolment.join(tmp_path / "dev-1", new["dev-1.grant"], fleet.fingerprint)
    assert member.grant.version_secret == fleet.secrets.version_secret
    assert member.grant.keys_since == fleet.roster.keys_since


def test_run_number_is_taken_before_told(fleet):
    """A crash right after leaves a gap, never a number twice."""
    run = fleet.take_run()
    again = FleetDirectory(fleet.path)
    assert again.secrets.next_run == run + 1
    assert again.take_run() == run + 1


def test_rotation_keeps_the_run_numbers(fleet):
    """A rotation draws every secret and keeps the run numbers."""
    fleet.take_run()
    old = fleet.secrets
    fleet.rotate()
    new = fleet.secrets
    assert drawn(old).isdisjoint(drawn(new))
    assert dataclasses.replace(new, broadcast_key=old.broadcast_key, version_secret=old.version_secret) == old
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
    journal = fleet.path / CHANGE_FILE
    journal.write_bytes(encode(Change(*new)))
    journal.chmod(0o600)
    again = FleetDirectory(fleet.path)
    assert [f.read_bytes() for f in files] == new
    assert not journal.exists()
    assert again.secrets == fleet.secrets
    assert again.roster.keys_since == fleet.roster.keys_since
    assert make_plan(again, BUNDLE, OPTIONS).key_version == fleet.roster.keys_since


def change_elsewhere(fleet):
    """Let another program of the owner's rotate while this one has the directory open."""
    FleetDirectory(fleet.path).rotate()


@pytest.mark.parametrize(
    "late",
    [lambda f: f.take_run(), lambda f: f.rotate(), lambda f: f.revoke("dev-3")],
    ids=["take_run", "rotate", "revoke"],
)
def test_two_programs_undo_nothing(fleet, late):
    """Old secrets over new ones, under the new roster, would cut every later device off."""
    fleet.take_run()
    change_elsewhere(fleet)
    fresh = FleetDirectory(fleet.path)
    late(fleet)
    again = FleetDirectory(fleet.path)
    assert again.secrets == fleet.secrets
    assert again.roster == fleet.roster
    assert again.roster.sequence >= fresh.roster.sequence
    assert again.secrets.next_run >= fresh.secrets.next_run
    if again.roster.sequence == fresh.roster.sequence:
        assert drawn(again.secrets) == drawn(fresh.secrets)
    else:
        assert again.roster.keys_since == again.roster.sequence


def test_the_secrets_show_no_bytes(fleet):
    shown = repr(fleet.secrets)
    for secret in drawn(fleet.secrets):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
