"""The simulated fleet applies a device's own checks, and its uploads are masked under the open round's key."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.fleet import MaskedFleet
from shoal_lab.bench.attacks.structure.keys import LIFETIMES, FleetKeys

from shoal.errors import UntrustedError

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_uploads_are_the_clear_updates_under_the_rounds_key(lab, lifetime):
    fleet = MaskedFleet(lab, "permutation", lifetime, 5)
    for round_ in (1, 2):
        sent = fleet.uploads()
        assert fleet.round == round_
        assert np.array_equal(fleet.keys.unmasked(sent, round_), fleet.clear)
        fleet.announce(sent.mean(0))


def test_means_add_up_under_fresh_keys_and_replace_each_other_under_one(lab):
    mean = np.full(lab.length, 0.01, np.float32)
    for lifetime, steps in (("run", 1), ("round", 3)):
        fleet = MaskedFleet(lab, "permutation", lifetime, 3)
        for _ in range(3):
            fleet.announce(mean)
        assert np.allclose(fleet.held - fleet.origin, steps * 0.01, atol=1e-6)


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_a_mean_beyond_the_plans_limit_is_refused(lab, lifetime):
    fleet = MaskedFleet(lab, "rotation", lifetime, 3)
    with pytest.raises(UntrustedError, match="is allowed for one step"):
        fleet.announce(np.full(lab.length, 100.0, np.float32))
    assert fleet.round == 1
    assert np.array_equal(fleet.held, fleet.origin)


def test_images_are_the_same_in_each_round_if_asked(lab):
    for same in (False, True):
        fleet = MaskedFleet(lab, "none", "round", 20, same_images=same)
        fleet.train()
        first = fleet.x
        fleet.train()
        assert np.array_equal(first, fleet.x) == same


def test_energies_of_clear_directions_lie_in_their_units(lab):
    """A masked basis vector has all of its energy in one unit, under the right key alone."""
    fleet = MaskedFleet(lab, "rotation", "round", 3)
    basis = np.eye(lab.length, dtype=np.float32)[[0, lab.length - 1]]
    masked = fleet.keys.masked(basis, 1)
    energies = fleet.energies(masked, 1)
    assert energies[0, 0] == pytest.approx(1, abs=1e-4)
    assert energies[1].sum() == pytest.approx(0, abs=1e-4)
    wrong = fleet.energies(masked, 1, FleetKeys(lab, "rotation", "round", lab.length, "another"))
    assert wrong.max() < 0.1
