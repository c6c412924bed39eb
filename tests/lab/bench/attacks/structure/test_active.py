"""The active structure attack undoes permutations under both key lifetimes, and finds nothing under fresh rotations."""

import pytest
from shoal_lab.bench.attacks.structure.active import structure

pytestmark = pytest.mark.torch
PERMUTING = ("permutation", "signed-permutation")


@pytest.mark.parametrize("mode", PERMUTING)
def test_one_key_a_run_falls(lab, mode):
    found = structure(lab, mode, "run", 15)
    assert found.success >= 0.9
    assert found.chance < 0.15
    assert (found.name, found.keys, found.devices) == ("structure-active", "run", 15)


@pytest.mark.parametrize("mode", PERMUTING)
def test_fresh_permutations_fall_too(lab, mode):
    small, large = (structure(lab, mode, "round", n) for n in (15, 100))
    assert small.success >= small.chance + 0.2
    assert large.success >= large.chance + 0.3


@pytest.mark.parametrize("devices", [15, 100])
def test_fresh_rotations_hold(lab, devices):
    found = structure(lab, "rotation", "round", devices)
    assert abs(found.success - found.chance) <= 0.05
    assert found.success < 0.3


def test_without_a_mask_the_layout_is_known(lab):
    assert structure(lab, "none", "run", 15).success == 1
