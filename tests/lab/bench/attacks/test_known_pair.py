"""The map of a permutation, read from a known pair."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.known_pair import read_map, share_placed, undo

from crypto.mask.modes.registry import MODES

RNG_SEED = 5


def normal(*shape, seed=RNG_SEED):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("flip", [False, True])
def test_a_map_is_read_from_a_pair_and_undoes_it(flip):
    """With signs and without, on a permutation made here."""
    rng = np.random.default_rng(RNG_SEED)
    clear, other, order = normal(300), normal(300, seed=6), rng.permutation(300)
    sign = np.where(rng.random(300) < 0.5, -1, 1).astype(np.float32) if flip else np.ones(300, np.float32)
    places, signs = read_map(clear, (clear * sign)[order], "magnitudes" if flip else "values")
    assert np.array_equal(places, order)
    assert np.array_equal(undo((other * sign)[order], places, signs), other)


def test_rounding_errors_do_no_harm():
    """Ranks are matched, so the values need not be equal."""
    clear, order = normal(50), np.random.default_rng(1).permutation(50)
    places, _ = read_map(clear, clear[order] + np.float32(1e-7), "values")
    assert np.array_equal(places, order)


@pytest.mark.torch
@pytest.mark.parametrize("mode", MODES)
def test_places_are_judged_by_the_masks_own(lab, mode):
    """A mixture of coordinates has none, so none is right."""
    truth = lab.places(mode)
    assert share_placed(lab, mode, np.maximum(truth, 0)) == (0.0 if mode == "rotation" else 1.0)
    shifted = (np.maximum(truth, 0) + 1) % lab.length
    assert share_placed(lab, mode, shifted) == 0.0
