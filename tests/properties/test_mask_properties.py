"""Properties that a mask preserves and that it changes, for any vectors, segments and contexts."""

from __future__ import annotations

import dataclasses

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import cosine_matrix
from aggregator.numerics.bipartition import bipartition
from crypto.mask.derivation import MaskContext, MaskKey, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.modes.registry import MODES
from crypto.mask.secret import MaskSecret
from shoal.types import MaskedVector, Segment

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(-1024, 1024, width=32)
EXACT = tuple(name for name, mode in MODES.items() if mode.exact)


@st.composite
def keys(
    draw: st.DrawFn, *, min_length: int = 1, max_length: int = 40, modes: tuple[str, ...] = tuple(MODES)
) -> MaskKey:
    lengths = draw(st.lists(st.integers(min_length, max_length), min_size=1, max_size=2))
    names = draw(st.permutations(["cluster", "shared"]))
    segments = tuple(Segment(name, length) for name, length in zip(names, lengths, strict=False))
    context = MaskContext(
        fleet=draw(st.from_regex(r"[a-z0-9][a-z0-9-]{0,10}", fullmatch=True)),
        run_id=draw(st.binary(min_size=1, max_size=16)),
        task_digest=draw(st.binary(min_size=32, max_size=32)),
        mode=draw(st.sampled_from(modes)),
        segments=segments,
        key_version=draw(st.integers(0, 1 << 32)),
        round=draw(st.integers(0, 1 << 40)),
    )
    return derive(MaskSecret.from_bytes(draw(st.binary(min_size=32, max_size=32))), context)


@given(keys(modes=EXACT), st.data())
def test_unmask_undoes_mask(key: MaskKey, data: st.DataObject) -> None:
    vector = data.draw(hnp.arrays(np.float32, key.length, elements=FINITE))
    assert unmask(mask(vector, key), key).tobytes() == vector.tobytes()


@given(keys(modes=("rotation",), max_length=9000), st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6))
def test_unmask_undoes_a_rotation(key: MaskKey, seed: int, size: float) -> None:
    """At any length, also where blocks leave a rest, and at any size of values, some far larger than others."""
    rng = np.random.default_rng(seed)
    vector = (size * rng.standard_normal(key.length) ** 5).astype(np.float32)
    back = unmask(mask(vector, key), key)
    assert np.linalg.norm(back.astype(np.float64) - vector) <= 1e-6 * np.linalg.norm(vector.astype(np.float64))


@given(keys(modes=EXACT))
def test_segments_hold_their_own_coordinates(key: MaskKey) -> None:
    """Every segment of the masked vector holds exactly its own coordinates, each once, up to signs."""
    masked = np.abs(mask(np.arange(key.length, dtype=np.float32), key).values)
    start = 0
    for segment in key.context.segments:
        stop = start + segment.length
        np.testing.assert_array_equal(np.sort(masked[start:stop]), np.arange(start, stop))
        start = stop


@given(keys(), st.data())
def test_segments_never_mix(key: MaskKey, data: st.DataObject) -> None:
    """A segment of the masked vector depends on that segment of the clear one alone, bit for bit."""
    vector, other = (data.draw(hnp.arrays(np.float32, key.length, elements=MODERATE)) for _ in range(2))
    start = 0
    for segment in key.context.segments:
        own = slice(start, start + segment.length)
        mixed = other.copy()
        mixed[own] = vector[own]
        assert mask(mixed, key).values[own].tobytes() == mask(vector, key).values[own].tobytes()
        start = own.stop


@given(keys(), st.data())
def test_mean_of_masked_is_the_masked_mean(key: MaskKey, data: st.DataObject) -> None:
    """Bit for bit if the mode is exact, up to the sign of zeros; else to 1e-6 of the vectors' size."""
    count = data.draw(st.integers(1, 6))
    rows = data.draw(hnp.arrays(np.float32, (count, key.length), elements=MODERATE))
    weights = np.array(data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count)), dtype=np.float64)
    masked = np.stack([mask(row, key).values for row in rows])
    mean = unmask(MaskedVector(weighted_mean(masked, weights), key.key_id), key)
    clear = weighted_mean(rows, weights)
    if key.exact:
        assert np.array_equal(mean, clear)
    else:
        assert np.linalg.norm(mean - clear) <= 1e-6 * np.linalg.norm(rows, axis=1).max()


@given(keys(max_length=600), st.integers(0, 2**32 - 1))
def test_norms_and_dot_products_survive(key: MaskKey, seed: int) -> None:
    """To 1e-6 of the product of the norms, in every mode and at every length."""
    rows = np.random.default_rng(seed).standard_normal((4, key.length), dtype=np.float32)
    masked = np.stack([mask(row, key).values for row in rows]).astype(np.float64)
    rows = rows.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1)
    assert np.all(np.abs(masked @ masked.T - rows @ rows.T) <= 1e-6 * np.outer(norms, norms))


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(0, 1 << 20), st.sampled_from(sorted(MODES)))
def test_masked_split_is_the_clear_one(seed: int, round_: int, mode: str) -> None:
    """Cfl Alg. 1 finds the same halves under the mask, on two noisy groups of updates."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.arange(12) % 2)
    centres = rng.standard_normal((2, 500))
    rows = (centres[group] + 0.3 * rng.standard_normal((12, 500))).astype(np.float32)
    context = MaskContext(
        fleet="f",
        run_id=b"r",
        round=round_,
        task_digest=bytes(32),
        mode=mode,
        segments=(Segment("shared", 100), Segment("cluster", 400)),
    )
    key = derive(MaskSecret.from_bytes(bytes(32)), context)
    clear = bipartition(cosine_matrix(rows))
    masked = bipartition(cosine_matrix([mask(row, key).values for row in rows]))
    assert (masked.left, masked.right) == (clear.left, clear.right)
    assert len(set(group[list(clear.left)])) == len(set(group[list(clear.right)])) == 1


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.sampled_from([name for name in MODES if name != "none"]))
def test_different_rounds_mask_differently(first: int, second: int, mode: str) -> None:
    """The masks of two rounds agree on 64 coordinates only if they are the same round."""
    context = MaskContext(
        fleet="f", run_id=b"r", round=first, task_digest=bytes(32), mode=mode, segments=(Segment("cluster", 64),)
    )
    secret = MaskSecret.from_bytes(bytes(32))
    vector = np.arange(64, dtype=np.float32)
    one = mask(vector, derive(secret, context)).values
    other = mask(vector, derive(secret, dataclasses.replace(context, round=second))).values
    assert np.array_equal(one, other) == (first == second)
