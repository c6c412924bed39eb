"""Crafted and honest updates give away units under permutations, and nothing under fresh rotations."""

import pytest
from shoal_lab.bench.attacks.structure.coordinates import (
    independence,
    purity,
    structure_active,
    structure_passive,
)

pytestmark = pytest.mark.torch
PERMUTING = ("permutation", "signed-permutation")
BOTH = pytest.mark.parametrize("structure", [structure_active, structure_passive])


@pytest.mark.parametrize("mode", PERMUTING)
def test_crafted_means_undo_permutations(lab, mode):
    found = structure_active(lab, mode, "run", 15)
    assert found.success >= 0.9
    assert found.chance < 0.15
    for devices, more in ((15, 0.2), (100, 0.3)):
        fresh = structure_active(lab, mode, "round", devices)
        assert fresh.success >= fresh.chance + more


@pytest.mark.parametrize("lifetime", ["run", "round"])
@pytest.mark.parametrize("mode", PERMUTING)
def test_honest_updates_undo_permutations(lab, mode, lifetime):
    found = structure_passive(lab, mode, lifetime, 100)
    assert found.success >= 0.5
    assert found.chance < 0.05


@BOTH
@pytest.mark.parametrize("devices", [15, 100])
def test_fresh_rotations_hold(lab, structure, devices):
    found = structure(lab, "rotation", "round", devices)
    assert abs(found.success - found.chance) <= 0.05
    assert found.success < 0.3


@BOTH
def test_without_a_mask_the_layout_is_known(lab, structure):
    assert structure(lab, "none", "run", 15).success >= 0.98


def test_components_under_one_rotation(lab):
    """Many vectors give the units away; few do not, nor do those of fresh rotations. Other masks need no analysis."""
    assert purity(lab, "rotation", "run", 4.0).success >= 0.6
    for lifetime, count in (("run", 0.1), ("round", 0.1), ("round", 4.0)):
        assert not purity(lab, "rotation", lifetime, count).works
    assert independence(lab, "permutation") == []
