"""Keys of rounds: one for all rounds of a run, or one for each."""

import hashlib

import numpy as np
import pytest
from shoal_lab.bench.attacks.lab import FLEET, KEY_VERSION, RUN_ID
from shoal_lab.bench.attacks.structure.keys import LIFETIMES, FleetKeys

from crypto.mask.derivation import derive
from crypto.mask.masking import mask
from crypto.mask.modes.registry import MODES
from crypto.mask.schedule import VersionKey
from shoal.types import Segment

pytestmark = pytest.mark.torch
LENGTH = 300


def normal(*shape):
    return np.random.default_rng(4).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("lifetime", LIFETIMES)
@pytest.mark.parametrize("mode", MODES)
def test_a_mask_is_undone_by_its_rounds_key(lab, mode, lifetime):
    keys, rows = FleetKeys(lab, mode, lifetime, LENGTH), normal(3, LENGTH)
    assert np.allclose(keys.unmasked(keys.masked(rows, 5), 5), rows, atol=1e-5)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "none"])
def test_keys_change_with_the_round_under_fresh_keys_only(lab, mode):
    rows = normal(1, LENGTH)
    for lifetime in LIFETIMES:
        keys = FleetKeys(lab, mode, lifetime, LENGTH)
        assert np.array_equal(keys.masked(rows, 1), keys.masked(rows, 2)) == (lifetime == "run")
        assert (keys.key(1).key_id == keys.key(2).key_id) == (lifetime == "run")


def test_another_owner_has_other_keys(lab):
    rows = normal(1, LENGTH)
    mine, theirs = (FleetKeys(lab, "permutation", "run", LENGTH, owner) for owner in ("fleet", "another"))
    assert not np.array_equal(mine.masked(rows, 1), theirs.masked(rows, 1))


def test_fresh_keys_are_those_of_the_key_schedule(lab):
    """A device that takes the rounds one after the other masks alike."""
    mode, rows = "signed-permutation", normal(1, LENGTH)
    chain = VersionKey(FLEET, KEY_VERSION, hashlib.sha256(b"shoal bench privacy/fleet").digest()).begin_run(
        RUN_ID, first_round=1
    )
    for round_ in (1, 2, 3):
        taken = chain.take()
        key = derive(taken.mask, taken.context(lab.bundle.digest, mode, (Segment("cluster", LENGTH),)))
        made = FleetKeys(lab, mode, "round", LENGTH).masked(rows, round_)
        assert np.array_equal(mask(rows[0], key).values, made[0])


@pytest.mark.parametrize("mode", MODES)
def test_places_are_those_of_the_mask(lab, mode):
    """They name the copied coordinate, up to sign; a rotation copies none."""
    keys, rows = FleetKeys(lab, mode, "round", LENGTH), normal(1, LENGTH)
    places = keys.places(3)
    if mode == "rotation":
        assert (places == -1).all()
    else:
        assert np.array_equal(np.abs(rows[0][places]), np.abs(keys.masked(rows, 3)[0]))
