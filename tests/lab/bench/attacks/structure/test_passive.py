"""Honest updates link the coordinates of a unit under permutations, and nothing under fresh rotations."""

import pytest
from shoal_lab.bench.attacks.structure.passive import structure

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("lifetime", ["run", "round"])
@pytest.mark.parametrize("mode", ["permutation", "signed-permutation"])
def test_permutations_fall(lab, mode, lifetime):
    found = structure(lab, mode, lifetime, 100)
    assert found.success >= 0.5
    assert found.chance < 0.05


@pytest.mark.parametrize("devices", [15, 100])
def test_fresh_rotations_hold(lab, devices):
    found = structure(lab, "rotation", "round", devices)
    assert abs(found.success - found.chance) <= 0.05
    assert found.success < 0.2


def test_without_a_mask_the_layout_is_known(lab):
    assert structure(lab, "none", "run", 15).success >= 0.98
