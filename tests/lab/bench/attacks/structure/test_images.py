"""A constant and a spike, or crafted means, show images under permutations, and none under fresh rotations."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.images import CONSTANT, constant, poke, results, spiked

pytestmark = pytest.mark.torch
NAMES = ("image-active", "image-active, crafted means")


@pytest.mark.parametrize(("lifetime", "devices"), [("run", 15), ("round", 100)])
def test_the_constant_and_the_spike_undo_a_permutation(lab, lifetime, devices):
    image, levels = results(lab, "permutation", lifetime, devices, "image-active")
    assert image.success >= image.chance + 15
    assert levels.success >= 0.5
    assert (image.keys, image.devices) == (lifetime, devices)


def test_few_devices_show_grey_levels_under_fresh_permutations(lab):
    _, levels = results(lab, "permutation", "round", 15, "image-active")
    assert levels.success >= 0.4


@pytest.mark.parametrize("mode", ["permutation", "signed-permutation"])
@pytest.mark.parametrize(("lifetime", "devices"), [("run", 15), ("round", 100)])
def test_crafted_means_undo_permutations(lab, mode, lifetime, devices):
    image, levels = results(lab, mode, lifetime, devices, NAMES[1])
    assert image.success >= image.chance + 15
    assert levels.success >= 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [15, 100])
def test_fresh_rotations_hold(lab, name, devices):
    image, levels = results(lab, "rotation", "round", devices, name)
    assert image.success <= image.chance + 1
    assert levels.success == 0


def test_without_a_mask_images_are_read_off(lab):
    image, _ = results(lab, "none", "round", 15, NAMES[1])
    assert image.success >= 40


@pytest.mark.parametrize(("mode", "dead"), [("permutation", True), ("rotation", False)])
def test_the_constant_is_a_fixed_point_of_permutations_alone(lab, mode, dead):
    """Few coordinates move after it, although each round has a key of its own."""
    fleet, sheets, _ = poke(lab, mode, "round", 15)
    moved = (sheets[0][0] != 0).any(0).sum()
    assert (moved < 200) == dead
    assert (fleet.held.mean() < CONSTANT / 2) == dead


def test_the_hadamard_forms_have_the_norm_of_the_plain_ones():
    for plain, turned in (
        (constant(300), constant(300, hadamard=True)),
        (spiked(300, 7), spiked(300, 7, hadamard=True)),
    ):
        assert np.linalg.norm(plain) == pytest.approx(np.linalg.norm(turned), rel=1e-5)
        assert np.count_nonzero(plain) != np.count_nonzero(turned)
