"""A constant and a spike, or crafted means, show images under permutations, and none under fresh rotations."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.images import (
    results,
)

NAMES = ("image-active", "image-active, crafted means")
PIXELS, LEVELS, HIDDEN = 16, 16, 5
torch = pytest.mark.torch


@torch
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("lifetime", "devices"), [("run", 15), ("round", 100)])
def test_permutations_are_undone(lab, name, lifetime, devices):
    for mode in ("permutation", "signed-permutation")[: 1 + (name == NAMES[1])]:
        image, levels = results(lab, mode, lifetime, devices, name)
        assert image.success >= image.chance + 15
        assert levels.success >= 0.5


@torch
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [15, 100])
def test_fresh_rotations_hold(lab, name, devices):
    image, levels = results(lab, "rotation", "round", devices, name)
    assert image.success <= image.chance + 1
    assert levels.success == 0


@torch
def test_without_a_mask_images_are_read_off(lab):
    assert results(lab, "none", "round", 15, NAMES[1])[0].success >= 40


def images(n, seed):
    """Return images whose pixels differ in brightness and are correlated with the next one."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((n, PIXELS))
    smooth = noise + np.roll(noise, 1, axis=1) + np.linspace(-2, 2, PIXELS)
    return np.rint(np.clip(0.5 + 0.25 * smooth, 0, 1) * LEVELS).astype(np.float32) / LEVELS
