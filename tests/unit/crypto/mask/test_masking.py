"""Masking and unmasking one vector, and everything that must be refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from crypto.mask.derivation import MaskContext, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.modes.registry import MODES
from crypto.mask.secret import MaskSecret
from shoal.errors import IntegrityError, KeyMismatchError, UsageError
from shoal.types import MaskedVector, Segment

SECRET = MaskSecret.from_bytes(bytes(range(32)))
CONTEXT = MaskContext(
    fleet="plant-7",
    run_id=b"run",
    task_digest=bytes(32),
    mode="permutation",
    segments=(Segment("cluster", 1000),),
)
KEY = derive(SECRET, CONTEXT)
VECTOR = np.random.default_rng(7).standard_normal(1000, dtype=np.float32)


def test_only_the_rotation_is_not_exact() -> None:
    assert [name for name, mode in MODES.items() if not mode.exact] == ["rotation"]


@pytest.mark.parametrize("mode", MODES)
def test_masking_leaves_its_input_alone(mode: str) -> None:
    key = derive(SECRET, dataclasses.replace(CONTEXT, mode=mode))
    vector, kept = VECTOR.copy(), VECTOR.copy()
    masked = mask(vector, key)
    values = masked.values.copy()
    unmask(masked, key)
    np.testing.assert_array_equal(vector, kept)
    np.testing.assert_array_equal(masked.values, values)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", MODES)
def test_no_mode_opens_another_ones_vectors(mode: str, other: str) -> None:
    """A wrong mode is a wrong key, in both directions and for every pair."""
    made, held = (derive(SECRET, dataclasses.replace(CONTEXT, mode=name)) for name in (mode, other))
    if mode == other:
        assert unmask(mask(VECTOR, made), held).shape == VECTOR.shape
    else:
        with pytest.raises(KeyMismatchError, match=held.key_id.hex()):
            unmask(mask(VECTOR, made), held)


def test_overflowing_rotation_is_refused() -> None:
    """Finite coordinates whose norm is beyond float32 can't be mixed."""
    key = derive(SECRET, dataclasses.replace(CONTEXT, mode="rotation"))
    vector = np.full(1000, 3e38, dtype=np.float32)
    with pytest.raises(IntegrityError, match="under its mask"):
        mask(vector, key)
    with pytest.raises(IntegrityError, match="unmasked vector"):
        unmask(MaskedVector(vector, key.key_id), key)


def test_masked_vector_is_new_float32() -> None:
    """The masked vector is new contiguous float32."""
    masked = mask(VECTOR, KEY)
    assert masked.values.dtype == np.dtype("<f4")
    assert masked.values.flags.c_contiguous
    assert masked.key_id == KEY.key_id
    assert not np.may_share_memory(masked.values, VECTOR)
    np.testing.assert_array_equal(mask(np.repeat(VECTOR, 2)[::2], KEY).values, masked.values, "strided is alike")


def test_mode_none_copies() -> None:
    """The upload under mode none does not alias the device's own vector."""
    masked = mask(VECTOR, derive(SECRET, dataclasses.replace(CONTEXT, mode="none")))
    np.testing.assert_array_equal(masked.values, VECTOR)
    assert not np.may_share_memory(masked.values, VECTOR)


def test_unmask_writes_to_out() -> None:
    out = np.empty(1000, dtype=np.float32)
    assert unmask(mask(VECTOR, KEY), KEY, out=out) is out
    np.testing.assert_array_equal(out, VECTOR)


@pytest.mark.parametrize("change", [{"round": 1}, {"run_id": b"other"}, {"mode": "none"}, {"fleet": "plant-8"}])
def test_a_wrong_key_is_refused(change: dict[str, object]) -> None:
    """A vector of another round, run, mode or fleet raises instead of giving a wrong model."""
    other = derive(SECRET, dataclasses.replace(CONTEXT, **change))  # type: ignore[arg-type]
    with pytest.raises(KeyMismatchError, match=KEY.key_id.hex()):
        unmask(mask(VECTOR, KEY), other)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (VECTOR.astype(np.float64), "float64"),
        (VECTOR.astype(">f4"), ">f4"),
        (VECTOR[:999], r"\(999,\)"),
        (VECTOR.reshape(1, -1), r"\(1, 1000\)"),
        (VECTOR.tolist(), "list"),
    ],
)
def test_mask_refuses_another_shape_or_dtype(vector: np.ndarray, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mask(vector, KEY)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, (np.inf, -np.inf)])
def test_not_finite_is_refused_on_both_ways(bad: float | tuple[float, float]) -> None:
    vector = VECTOR.copy()
    vector[[3, 500]] = bad
    with pytest.raises(IntegrityError, match="NaN or infinite"):
        mask(vector, KEY)
    with pytest.raises(IntegrityError, match="NaN or infinite"):
        unmask(MaskedVector(vector, KEY.key_id), KEY)


def test_large_finite_values_pass() -> None:
    """The check on the sum does not refuse a vector that is finite."""
    vector = np.full(1000, 3e38, dtype=np.float32)
    np.testing.assert_array_equal(unmask(mask(vector, KEY), KEY), vector)


@pytest.mark.parametrize("values", [VECTOR[:999], VECTOR.astype(np.float64), VECTOR.reshape(10, 100)])
def test_unmask_refuses_a_malformed_vector(values: np.ndarray) -> None:
    """Unmask refuses a malformed vector of the right key."""
    with pytest.raises(IntegrityError, match="masked vector has shape"):
        unmask(MaskedVector(values, KEY.key_id), KEY)


def test_unmask_refuses_a_bad_out() -> None:
    masked = mask(VECTOR, KEY)
    frozen = np.empty(1000, dtype=np.float32)
    frozen.flags.writeable = False
    for out, message in (
        (np.empty(999, dtype=np.float32), "999"),
        (np.empty(1000), "float64"),
        (np.empty(2000, dtype=np.float32)[::2], "contiguous"),
        (frozen, "writeable"),
        (masked.values, "shares memory"),
    ):
        with pytest.raises(UsageError, match=message):
            unmask(masked, KEY, out=out)
