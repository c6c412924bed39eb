"""The dense matrix before a mask: uniformly distributed, the same bits on every machine, and nothing but products left."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from crypto.mask.dense import Dense, behind_matrix, directions
from crypto.mask.derivation import MaskContext, MaskKey, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.modes.registry import MODES
from crypto.mask.secret import MaskSecret
from shoal import limits
from shoal.errors import UsageError
from shoal.types import Segment

SECRET = MaskSecret.from_bytes(bytes(range(32)))
CONTEXT = MaskContext(
    fleet="plant-7",
    run_id=b"run",
    task_digest=bytes(32),
    mode="rotation",
    segments=(Segment("cluster", 600),),
)
FIGURES = np.zeros((4, 600), np.float32)
FIGURES[:, :17] = np.random.default_rng(3).uniform(-1, 1, (4, 17))


def key_in(mode: str, size: int, **changes: int) -> MaskKey:
    return behind_matrix(derive(SECRET, dataclasses.replace(CONTEXT, mode=mode, **changes)), SECRET, size)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
@pytest.mark.parametrize("size", [17, 32, 512])
def test_vectors_come_back(mode: str, size: int) -> None:
    """Vectors come back and their products stay."""
    key = key_in(mode, size)
    sent = [mask(row, key) for row in FIGURES]
    for row, masked in zip(FIGURES, sent, strict=True):
        np.testing.assert_allclose(unmask(masked, key), row, atol=2e-6)
    found = np.stack([masked.values for masked in sent]).astype(np.float64)
    np.testing.assert_allclose(found @ found.T, FIGURES.astype(np.float64) @ FIGURES.T, atol=1e-5)
    assert not key.exact
    assert key.key_id == derive(SECRET, dataclasses.replace(CONTEXT, mode=mode)).key_id


def test_permuted_figures_are_hidden() -> None:
    """A permutation shows none of the figures any more."""
    values = mask(FIGURES[0], key_in("permutation", 32)).values
    assert np.count_nonzero(values) == 32
    assert not np.isin(np.abs(values), np.abs(FIGURES[0, :17]))[values != 0].any()


def test_mode_none_hides_nothing() -> None:
    key = key_in("none", 32)
    np.testing.assert_array_equal(mask(FIGURES[0], key).values, FIGURES[0])
    assert key.exact


def test_every_round_has_another_matrix() -> None:
    first, second = (mask(FIGURES[0], key_in("permutation", 32, round=r)).values for r in (1, 2))
    assert not np.isin(first[first != 0], second).any()


@pytest.mark.parametrize("size", [0, 601, limits.MAX_STATISTICS + 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"a matrix of {size} rows"):
        key_in("rotation", size)


def matrices(size: int, count: int) -> np.ndarray:
    """Return orthogonal matrices of ``count`` keys, (count, n, n)."""
    key = derive(SECRET, CONTEXT)
    units = np.eye(size, 600, dtype=np.float32)
    found = np.empty((count, size, size))
    for at in range(count):
        seeds = (bytes([part, *at.to_bytes(3, "big")]) * 8 for part in (0, 1))
        dense = Dense(key, directions(*seeds, size))
        found[at] = np.stack([dense._reflected(unit, range(size)) for unit in units], 1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
def test_matrices_are_uniformly_distributed(size: int) -> None:
    """Moments of entries, of their products and of traces under Haar's measure, within five standard errors."""
    count = 1500
    found = matrices(size, count)
    np.testing.assert_allclose(found @ found.transpose(0, 2, 1), np.broadcast_to(np.eye(size), found.shape), atol=1e-13)
    error = 5 / np.sqrt(count)
    assert np.abs(found.mean(0)).max() < error
    assert np.abs((found**2).mean(0) - 1 / size).max() < error / size
    assert np.abs((found**4).mean(0) - 3 / (size * (size + 2))).max() < 2 * error / size
    assert abs(np.linalg.det(found).mean()) < error, "rotations and reflections alike"
    trace = np.trace(found, axis1=1, axis2=2)
    assert abs(trace.mean()) < error
    assert abs((trace**2).mean() - 1) < 2 * error
    # Invariance: moments of another entry of R Q S, R and S fixed orthogonal matrices, are the same.
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((2, size, size)))[0]
    assert np.abs(((turn[0] @ found @ turn[1]) ** 4).mean(0) - 3 / (size * (size + 2))).max() < 2 * error / size


def test_the_matrix_is_secret() -> None:
    key = key_in("rotation", 32)
    assert "redacted" in repr(key.transforms[0])
    assert "redacted" in repr(key)
    with pytest.raises(TypeError):
        pickle.dumps(key)
