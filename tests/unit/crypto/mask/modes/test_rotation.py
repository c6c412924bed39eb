"""Mode ``rotation``: norms and dot products stay, single coordinates and layers do not show."""

from __future__ import annotations

import numpy as np
import pytest

from crypto.mask.masking import mask
from tests.helpers.masks import key_of, normal


@pytest.mark.parametrize("length", [1, 2, 3, 4096, 5000, 100_003])
def test_orthonormal_at_every_length(length: int) -> None:
    """A rotation is orthonormal at every length."""
    key = key_of("rotation", length)
    rows = np.stack([normal(length, seed) for seed in range(4)])
    masked = np.stack([mask(row, key).values for row in rows]).astype(np.float64)
    gram = rows.astype(np.float64) @ rows.T.astype(np.float64)
    norms = np.sqrt(np.diag(gram))
    assert np.max(np.abs(masked @ masked.T - gram) / np.outer(norms, norms)) <= 1e-6


def test_rotation_hides_the_layer() -> None:
    """Layers a hundred times apart in size come out with the same spread everywhere, which permutations do not hide."""
    layers = np.concatenate([normal(20_000), 0.01 * normal(20_000, 1)])
    spread = {}
    for mode in ("permutation", "rotation"):
        sizes = np.sort(np.abs(mask(layers, key_of(mode, 40_000)).values))
        spread[mode] = np.median(sizes[20_000:]) / np.median(sizes[:20_000])
    assert spread["permutation"] > 50
    assert spread["rotation"] < 5
