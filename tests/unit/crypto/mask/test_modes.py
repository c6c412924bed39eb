"""Effect of each mode on values, its memory, and its repr."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from crypto.mask.keys import MaskContext, MaskKey, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.modes.permutation import BLOCKED_FROM
from crypto.mask.modes.registry import MODES
from crypto.mask.secret import MaskSecret
from shoal.types import MaskedVector, Segment

SECRET = MaskSecret.from_bytes(bytes(range(32)))
KEPT_BYTES = {"none": 0, "permutation": 4, "signed-permutation": 5, "rotation": 7}
"""A coordinate, in the key."""


def key_of(mode: str, *lengths: int) -> MaskKey:
    names = ("shared", "cluster") if len(lengths) > 1 else ("cluster",)
    segments = tuple(Segment(name, length) for name, length in zip(names, lengths, strict=True))
    return derive(
        SECRET,
        MaskContext(fleet="plant-7", run_id=b"run", epoch=0, task_digest=bytes(32), mode=mode, segments=segments),
    )


def normal(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(length, dtype=np.float32)


def test_the_registry_has_the_modes_of_the_design_in_order() -> None:
    assert list(MODES) == ["none", "permutation", "signed-permutation", "rotation"]


def test_signs_flip_half_of_the_coordinates_and_keep_their_size() -> None:
    values = mask(np.arange(1, 10_001, dtype=np.float32), key_of("signed-permutation", 10_000)).values
    np.testing.assert_array_equal(np.sort(np.abs(values)), np.arange(1, 10_001))
    assert 4700 < np.count_nonzero(values < 0) < 5300


def test_the_permutations_of_different_modes_are_not_the_same() -> None:
    """One epoch masked in two modes must not give the one away by the other."""
    ramp = np.arange(1, 1001, dtype=np.float32)
    plain, signed = (mask(ramp, key_of(mode, 1000)).values for mode in ("permutation", "signed-permutation"))
    assert np.count_nonzero(plain == np.abs(signed)) < 10


@pytest.mark.parametrize("length", [1, 2, 3, 4096, 5000, 100_003])
def test_a_rotation_is_orthonormal_at_every_length(length: int) -> None:
    key = key_of("rotation", length)
    rows = np.stack([normal(length, seed) for seed in range(4)])
    masked = np.stack([mask(row, key).values for row in rows]).astype(np.float64)
    gram = rows.astype(np.float64) @ rows.T.astype(np.float64)
    norms = np.sqrt(np.diag(gram))
    assert np.max(np.abs(masked @ masked.T - gram) / np.outer(norms, norms)) <= 1e-6


def test_a_rotation_spreads_one_coordinate_over_all() -> None:
    """A single one becomes thousands of values of similar size, which don't show its position."""
    vector = np.zeros(65_536, dtype=np.float32)
    vector[123] = 1
    values = mask(vector, key_of("rotation", 65_536)).values
    assert np.count_nonzero(values) > 65_000 * 0.6
    assert np.abs(values).max() < 0.05


def test_a_rotation_hides_which_layer_a_coordinate_is_of() -> None:
    """Layers a hundred times apart in size come out with the same spread everywhere, which permutations do not hide."""
    layers = np.concatenate([normal(20_000), 0.01 * normal(20_000, 1)])
    spread = {}
    for mode in ("permutation", "rotation"):
        sizes = np.sort(np.abs(mask(layers, key_of(mode, 40_000)).values))
        spread[mode] = np.median(sizes[20_000:]) / np.median(sizes[:20_000])
    assert spread["permutation"] > 50
    assert spread["rotation"] < 5


def test_segments_of_a_rotation_do_not_mix() -> None:
    """Values of one segment do not change any bit of the other."""
    key = key_of("rotation", 5000, 3000)
    vector, other = normal(8000), normal(8000, 1)
    other[:5000] = vector[:5000]
    one, two = mask(vector, key).values, mask(other, key).values
    np.testing.assert_array_equal(one[:5000], two[:5000])
    assert not np.any(one[5000:] == two[5000:])


def test_the_mean_of_rotated_vectors_is_the_rotated_mean() -> None:
    key = key_of("rotation", 10_007)
    rows = np.stack([normal(10_007, seed) for seed in range(5)])
    mean = unmask(
        MaskedVector(np.stack([mask(r, key).values for r in rows]).mean(0, dtype=np.float32), key.key_id), key
    )
    assert np.linalg.norm(mean - rows.mean(0)) <= 1e-6 * np.linalg.norm(rows.mean(0))


@pytest.mark.parametrize("mode", MODES)
def test_repeating_a_mask_gives_the_same_bits(mode: str) -> None:
    """A device that derives its key again after a crash uploads the same bytes."""
    vector = normal(20_011)
    assert mask(vector, key_of(mode, 20_011)).values.tobytes() == mask(vector, key_of(mode, 20_011)).values.tobytes()


@pytest.mark.parametrize("length", [400_000, BLOCKED_FROM], ids=["gather", "blocked"])
@pytest.mark.parametrize("mode", MODES)
def test_memory_stays_within_what_is_documented(mode: str, length: int) -> None:
    """Bytes a coordinate: to derive, to keep, and beside input and output to mask and to unmask."""
    slack = 5 << 20
    source, out = normal(length), np.empty(length, dtype=np.float32)
    tracemalloc.start()
    try:
        key = key_of(mode, length)
        kept, peak = tracemalloc.get_traced_memory()
        assert kept <= KEPT_BYTES[mode] * length + slack
        assert peak <= 20 * length + slack
        for go in (key.apply, key.invert):
            tracemalloc.reset_peak()
            go(source, out)
            assert tracemalloc.get_traced_memory()[1] - kept <= 8 * length + slack
    finally:
        tracemalloc.stop()
