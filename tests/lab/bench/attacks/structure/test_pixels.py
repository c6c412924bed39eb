"""Grey levels and places of pixels are read from updates that a permutation hides."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.network import Network
from shoal_lab.bench.attacks.structure.pixels import align, place, read_images, read_units

PIXELS, LEVELS, HIDDEN = 16, 16, 5
NETWORK = Network(PIXELS, HIDDEN)


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


def test_a_revived_unit_shows_grey_levels_in_some_order(sheet):
    rows, truth = sheet
    (one, *_) = read_units(rows, HIDDEN, LEVELS, PIXELS)
    assert one.alive.mean() > 0.5
    assert np.allclose(np.sort(one.levels, axis=1), np.sort(truth[one.alive], axis=1), atol=1e-3)


def test_images_are_read_by_statistics_of_public_ones(sheet):
    rows, truth = sheet
    found = read_images([(rows, np.arange(400))], images(2000, 4), HIDDEN, LEVELS, 400)
    read = ~np.isnan(found[:, 0])
    assert read.mean() > 0.5
    assert np.mean(np.abs(found[read] - truth[read]) < 1e-3) > 0.9


def test_no_image_is_read_where_coordinates_are_mixed(sheet):
    rows, _ = sheet
    turn = np.linalg.qr(np.random.default_rng(5).standard_normal((NETWORK.length, NETWORK.length)))[0]
    mixed = (rows @ turn).astype(np.float32)
    assert read_units(mixed, HIDDEN, LEVELS, PIXELS) == []
    assert np.isnan(read_images([(mixed, np.arange(400))], images(500, 4), HIDDEN, LEVELS, 400)).all()


def test_columns_are_matched_to_pixels():
    truth, order = images(1500, 6), np.random.default_rng(8).permutation(PIXELS)
    assert np.array_equal(align(truth[:20, order].astype(float), truth[:20].astype(float)), order)
    assert np.mean(place(truth[:, order].astype(float), images(1500, 9)) == order) > 0.9
