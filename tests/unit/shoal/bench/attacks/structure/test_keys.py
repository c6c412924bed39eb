"""Keys of rounds: one for all rounds of a run, or one for each."""

import numpy as np
import pytest

from crypto.mask.modes.registry import MODES
from crypto.mask.secret import MaskSecret
from shoal.bench.attacks.structure.keys import LIFETIMES, RoundKeys, round_secret

pytestmark = pytest.mark.torch
LENGTH = 300


def normal(*shape):
    return np.random.default_rng(4).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("lifetime", LIFETIMES)
@pytest.mark.parametrize("mode", MODES)
def test_a_mask_is_undone_by_its_rounds_key(lab, mode, lifetime):
    keys, rows = RoundKeys(lab, mode, lifetime, LENGTH), normal(3, LENGTH)
    assert np.allclose(keys.unmasked(keys.masked(rows, 5), 5), rows, atol=1e-5)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "none"])
def test_keys_change_with_the_round_under_fresh_keys_only(lab, mode):
    rows = normal(1, LENGTH)
    for lifetime in LIFETIMES:
        keys = RoundKeys(lab, mode, lifetime, LENGTH)
        assert np.array_equal(keys.masked(rows, 1), keys.masked(rows, 2)) == (lifetime == "run")
        assert (keys.key(1).key_id == keys.key(2).key_id) == (lifetime == "run")


def test_another_owner_has_other_keys(lab):
    rows = normal(1, LENGTH)
    mine, theirs = (RoundKeys(lab, "permutation", "run", LENGTH, owner) for owner in ("fleet", "another"))
    assert not np.array_equal(mine.masked(rows, 1), theirs.masked(rows, 1))


def test_round_secrets_differ_by_round_and_by_run():
    first, second = MaskSecret.from_bytes(bytes(32)), MaskSecret.from_bytes(b"\1" * 32)
    made = {round_secret(s, r).reveal() for s in (first, second) for r in (1, 2)}
    assert len(made) == 4
    assert round_secret(first, 1) == round_secret(first, 1)


@pytest.mark.parametrize("mode", MODES)
def test_places_are_those_of_the_mask(lab, mode):
    """They name the copied coordinate, up to sign; a rotation copies none."""
    keys, rows = RoundKeys(lab, mode, "round", LENGTH), normal(1, LENGTH)
    places = keys.places(3)
    if mode == "rotation":
        assert (places == -1).all()
    else:
        assert np.array_equal(np.abs(rows[0][places]), np.abs(keys.masked(rows, 3)[0]))
