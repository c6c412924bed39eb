"""Allocation of mask epochs: no two runs share one, new grants have no earlier secret, and a crash loses nothing."""

import dataclasses
import shutil

import numpy as np
import pytest

from aggregator import membership as aggregators
from crypto.mask.derivation import MaskContext, derive, key_id
from crypto.mask.masking import mask
from edge_client import membership as enrolment
from edge_client.membership import DeviceMembership
from shoal.errors import IntegrityError
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import CHANGE_FILE, ROSTER_FILE, SECRETS_FILE, Change
from shoal.owner.runs.plan import RunOptions, make_plan, write_run
from shoal.protocol.codec import encode
from tests.helpers.fleets import FULL_BATCH
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle()
ONE_KEY = RunOptions("fedavg", keys="run", mode="permutation", local=FULL_BATCH, min_contributors=1)
"""Only runs with one key for each mask epoch allocate any."""


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "demo", "mqtt://loopback")
    made.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    for name in ("dev-1", "dev-2", "dev-3"):
        made.add_device(enrolment.init(tmp_path / name, name).read_bytes())
    return made


def sign(fleet, rounds=6, epoch_rounds=2):
    """Sign a run and return the mask epochs that it may take."""
    options = dataclasses.replace(ONE_KEY, rounds=rounds, epoch_rounds=epoch_rounds)
    plan = make_plan(fleet, BUNDLE, options)
    write_run(fleet, plan, BUNDLE, np.zeros((1, BUNDLE.length), np.float32))
    context = MaskContext(
        fleet="demo",
        run_id=plan.run_id,
        epoch=plan.epoch,
        task_digest=BUNDLE.digest,
        mode=plan.mode,
        segments=plan.mask_segments,
    )
    assert plan.key_id == key_id(fleet.secret_at(plan.epoch), context)
    return range(plan.epoch, plan.epoch + plan.epochs)


def distinct(*ranges):
    """Return whether the ranges are disjoint."""
    return len({n for r in ranges for n in r}) == sum(map(len, ranges))


def test_every_run_has_epochs_of_its_own(fleet):
    """As many as its rounds take, rounded up."""
    runs = [sign(fleet), sign(fleet, 5, 2), sign(fleet, 4, 0), sign(fleet, 3, 1)]
    assert [len(r) for r in runs] == [3, 3, 1, 3]
    assert distinct(*runs)
    assert [r.start for r in runs] == sorted(r.start for r in runs)


def test_a_restored_owner_repeats_no_mask(fleet, tmp_path):
    """A backup gives the run number and the mask epoch a second time; the run id still separates the two masks."""
    shutil.copytree(fleet.path, tmp_path / "backup")
    plans = []
    for owner in (fleet, FleetDirectory(tmp_path / "backup")):
        plan = make_plan(owner, BUNDLE, ONE_KEY)
        context = MaskContext(
            fleet="demo",
            run_id=plan.run_id,
            epoch=plan.epoch,
            task_digest=BUNDLE.digest,
            mode=plan.mode,
            segments=plan.mask_segments,
        )
        masked = mask(np.arange(BUNDLE.length, dtype=np.float32), derive(owner.secret_at(plan.epoch), context))
        plans.append((plan, masked.values.tolist()))
    (first, one), (second, other) = plans
    assert (first.run, first.epoch) == (second.run, second.epoch)
    assert one != other


def test_epochs_are_taken_before_anybody_hears_of_them(fleet):
    """A crash right after leaves a gap, never a number twice."""
    run, first = fleet.take_run(4)
    again = FleetDirectory(fleet.path)
    assert again.secrets.next_epoch == first + 4
    assert again.take_run(1) == (run + 1, first + 4)


def test_a_run_under_fresh_secrets_shares_no_epoch_with_one_that_rolls_over_to_them(fleet):
    """Whichever run is under way takes as many epochs of the fresh secrets as it was signed for, at most."""
    before = [sign(fleet), sign(fleet, 9, 1)]
    for _ in range(2):
        fleet.rotate()
        first = fleet.secrets.mask_epoch
        under_way = range(first, first + max(map(len, before)))
        after = sign(fleet)
        assert distinct(*before, under_way, after)
        assert after.start >= under_way.stop
        before.append(after)


def test_fresh_secrets_are_no_later_epoch_of_the_old_ones(fleet):
    old = fleet.secrets
    fleet.rotate()
    new = fleet.secrets
    assert new.mask_epoch == old.next_epoch
    assert fleet.secret_at(new.mask_epoch) != secret_of(old, new.mask_epoch)
    assert {old.content_key, old.broadcast_key, old.mask_secret}.isdisjoint(
        {new.content_key, new.broadcast_key, new.mask_secret}
    )
    assert fleet.roster.keys_since == fleet.roster.sequence
    assert fleet.roster.revoked == ()


def secret_of(secrets, epoch):
    from crypto.mask.secret import MaskSecret

    return MaskSecret.from_bytes(secrets.mask_secret).at(epoch, secrets.mask_epoch)


def test_rotation_renews_everybodys_grant(fleet, tmp_path):
    old = {p.name: p.read_bytes() for p in (fleet.path / "grants").iterdir()}
    fleet.rotate()
    new = {p.name: p.read_bytes() for p in (fleet.path / "grants").iterdir()}
    assert old.keys() == new.keys()
    assert all(old[name] != new[name] for name in old)
    member = enrolment.join(tmp_path / "dev-1", new["dev-1.grant"], fleet.fingerprint)
    assert member.grant.mask_secret == fleet.secrets.mask_secret
    assert member.grant.keys_since == fleet.roster.keys_since


def test_a_secret_that_is_forgotten_reaches_no_new_device(fleet, tmp_path):
    """The fleet has certified epoch 2: a grant from now on begins there."""
    epochs = sign(fleet)
    first, then = fleet.secret_at(epochs[0]), fleet.secret_at(epochs[1])
    assert fleet.forget_before(epochs[1])
    assert fleet.secrets.mask_epoch == epochs[1]
    assert fleet.secret_at(epochs[1]) == then
    assert first.reveal() not in (fleet.path / SECRETS_FILE).read_bytes()
    with pytest.raises(IntegrityError):
        FleetDirectory(fleet.path).secret_at(epochs[0])
    card = enrolment.init(tmp_path / "dev-4", "dev-4")
    enrolment.join(tmp_path / "dev-4", fleet.add_device(card.read_bytes()).read_bytes(), fleet.fingerprint)
    member = DeviceMembership(tmp_path / "dev-4")
    assert member.secret_at(0, epochs[1]) == then
    with pytest.raises(IntegrityError, match="can't be derived"):
        member.secret_at(0, epochs[0])


@pytest.mark.parametrize("ahead", [-1, 0, 3, 1000])
def test_an_epoch_that_no_run_was_given_is_not_believed(fleet, ahead):
    """Signed by whomever: the owner would lose the secret of epochs that are still to come. Nor does it go back."""
    epochs = sign(fleet)
    fleet.forget_before(epochs[0])
    before = (fleet.path / SECRETS_FILE).read_bytes()
    assert not fleet.forget_before(epochs[0] + ahead)
    assert (fleet.path / SECRETS_FILE).read_bytes() == before


def test_what_was_signed_before_can_still_be_signed_after(fleet):
    """Forgetting takes nothing from later runs."""
    epochs = sign(fleet)
    fleet.forget_before(epochs[-1])
    assert distinct(epochs, sign(fleet))


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
    assert sign(again).start == fleet.secrets.next_epoch


def change_elsewhere(fleet):
    """Let another program of the owner's rotate while this one has the directory open."""
    FleetDirectory(fleet.path).rotate()


@pytest.mark.parametrize(
    "late",
    [
        lambda f: f.take_run(1),
        lambda f: f.forget_before(f.secrets.mask_epoch + 1),
        lambda f: f.rotate(),
        lambda f: f.revoke("dev-3"),
    ],
    ids=["take_run", "forget_before", "rotate", "revoke"],
)
def test_two_programs_of_the_owners_do_not_undo_each_other(fleet, late):
    """Old secrets over new ones, under the new roster, would cut every later device off."""
    sign(fleet)
    change_elsewhere(fleet)
    fresh = FleetDirectory(fleet.path)
    late(fleet)
    again = FleetDirectory(fleet.path)
    assert again.secrets == fleet.secrets
    assert again.roster == fleet.roster
    assert again.roster.sequence >= fresh.roster.sequence
    assert again.secrets.mask_epoch >= fresh.secrets.mask_epoch
    assert again.secrets.next_epoch >= fresh.secrets.next_epoch
    if again.roster.sequence == fresh.roster.sequence:
        assert again.secrets.broadcast_key == fresh.secrets.broadcast_key
    else:
        assert again.roster.keys_since == again.roster.sequence


def test_the_secrets_show_no_bytes(fleet):
    shown = repr(fleet.secrets) + repr(dataclasses.replace(fleet.secrets, mask_epoch=5))
    assert fleet.secrets.mask_secret.hex() not in shown
    assert repr(fleet.secrets.mask_secret) not in shown
