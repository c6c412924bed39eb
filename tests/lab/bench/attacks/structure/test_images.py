"""A constant and a spike, or crafted means, show images under permutations, and none under fresh rotations."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.fleet import Network
from shoal_lab.bench.attacks.structure.images import (
    CONSTANT,
    constant,
    describe,
    poke,
    public_form,
    read_images,
    read_units,
    results,
    spiked,
)

NAMES = ("image-active", "image-active, crafted means")
PIXELS, LEVELS, HIDDEN = 16, 16, 5


NETWORK = Network(PIXELS, HIDDEN)


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
def test_few_devices_show_grey_levels(lab):
    _, levels = results(lab, "permutation", "round", 15, NAMES[0])
    assert levels.success >= 0.4


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


@torch
@pytest.mark.parametrize(("mode", "dead"), [("permutation", True), ("rotation", False)])
def test_constant_is_fixed_by_permutations(lab, mode, dead):
    """Few coordinates move after it, although each round has a key of its own."""
    fleet, rows, _ = poke(lab, mode, "round", 15)
    moved = (rows != 0).any(0).sum()
    assert (moved < 200) == dead
    assert (fleet.held.mean() < CONSTANT / 2) == dead


@pytest.mark.parametrize("make", [constant, lambda length, **how: public_form(spiked(length, 7), **how)])
def test_hadamard_forms_keep_the_norm(make):
    plain, turned = make(300), make(300, hadamard=True)
    assert np.linalg.norm(plain) == pytest.approx(np.linalg.norm(turned), rel=1e-5)
    assert np.count_nonzero(plain) != np.count_nonzero(turned)


def images(n, seed):
    """Return images whose pixels differ in brightness and are correlated with the next one."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((n, PIXELS))
    smooth = noise + np.roll(noise, 1, axis=1) + np.linspace(-2, 2, PIXELS)
    return np.rint(np.clip(0.5 + 0.25 * smooth, 0, 1) * LEVELS).astype(np.float32) / LEVELS


@pytest.fixture(scope="module")
def sheet():
    """Updates of one image each under a secret permutation with signs; one unit is alive for most."""
    rng, theta = np.random.default_rng(1), NETWORK.origin(np.random.default_rng(2)) - 0.3
    theta[13 + 2 * PIXELS] += 3
    truth = images(400, 3)
    clear = NETWORK.updates(theta, truth[:, None], rng.integers(0, 10, (400, 1)))
    signs = rng.choice([-1, 1], NETWORK.length).astype(np.float32)
    return (clear * signs)[:, rng.permutation(NETWORK.length)], truth


def test_statistics_read_images(sheet):
    """A revived unit shows grey levels in some order; statistics give their places."""
    rows, truth = sheet
    (one, *_) = read_units(rows, HIDDEN, LEVELS, PIXELS)
    assert one.alive.mean() > 0.5
    assert np.allclose(np.sort(one.levels, axis=1), np.sort(truth[one.alive], axis=1), atol=1e-3)
    found = read_images(rows, images(2000, 4), HIDDEN, LEVELS)
    read = ~np.isnan(found[:, 0])
    assert read.mean() > 0.5
    assert np.mean(np.abs(found[read] - truth[read]) < 1e-3) > 0.9


def test_mixed_coordinates_show_no_image(sheet):
    turn = np.linalg.qr(np.random.default_rng(5).standard_normal((NETWORK.length, NETWORK.length)))[0]
    mixed = (sheet[0] @ turn).astype(np.float32)
    assert read_units(mixed, HIDDEN, LEVELS, PIXELS) == []
    assert np.isnan(read_images(mixed, images(500, 4), HIDDEN, LEVELS)).all()


def test_rotation_keeps_descriptions():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((20, 60)).astype(np.float32)
    turn = np.linalg.qr(rng.standard_normal((60, 60)))[0].astype(np.float32)
    assert np.allclose(describe(rows), describe(rows @ turn), atol=1e-4)
    assert not np.allclose(describe(rows), describe(rows[::-1]), atol=1e-2)
