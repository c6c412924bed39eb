"""What a mask must keep and must change, for any vectors, segments and contexts."""

from __future__ import annotations

import dataclasses

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.similarity import cosine_matrix
from crypto.mask.keys import MaskContext, MaskKey, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.modes.registry import MODES
from crypto.mask.secret import MaskSecret
from wire.types import MaskedVector, Segment

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(-1024, 1024, width=32)


@st.composite
def keys(draw: st.DrawFn, *, min_length: int = 1) -> MaskKey:
    lengths = draw(st.lists(st.integers(min_length, 40), min_size=1, max_size=2))
    names = draw(st.permutations(["cluster", "shared"]))
    segments = tuple(Segment(name, length) for name, length in zip(names, lengths, strict=False))
    context = MaskContext(
        fleet=draw(st.from_regex(r"[a-z0-9][a-z0-9-]{0,10}", fullmatch=True)),
        run_id=draw(st.binary(min_size=1, max_size=16)),
        epoch=draw(st.integers(0, 1 << 40)),
        task_digest=draw(st.binary(min_size=32, max_size=32)),
        mode=draw(st.sampled_from(sorted(MODES))),
        segments=segments,
    )
    return derive(MaskSecret.from_bytes(draw(st.binary(min_size=32, max_size=32))), context)


@given(keys(), st.data())
def test_unmask_undoes_mask(key: MaskKey, data: st.DataObject) -> None:
    vector = data.draw(hnp.arrays(np.float32, key.length, elements=FINITE))
    np.testing.assert_array_equal(unmask(mask(vector, key), key), vector)


@given(keys())
def test_segments_never_mix(key: MaskKey) -> None:
    """Every segment of the masked vector holds exactly its own coordinates, each once."""
    masked = mask(np.arange(key.length, dtype=np.float32), key).values
    start = 0
    for segment in key.context.segments:
        stop = start + segment.length
        np.testing.assert_array_equal(np.sort(masked[start:stop]), np.arange(start, stop))
        start = stop


@given(keys(), st.data())
def test_the_mean_of_masked_vectors_is_the_masked_mean_bit_for_bit(key: MaskKey, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    rows = data.draw(hnp.arrays(np.float32, (count, key.length), elements=MODERATE))
    weights = np.array(data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count)), dtype=np.float64)
    masked = np.stack([mask(row, key).values for row in rows])
    mean = unmask(MaskedVector(weighted_mean(masked, weights), key.key_id), key)
    assert mean.tobytes() == weighted_mean(rows, weights).tobytes()


@given(keys(min_length=2), st.integers(0, 2**32 - 1))
def test_norms_and_cosines_survive(key: MaskKey, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((4, key.length), dtype=np.float32)
    masked = np.stack([mask(row, key).values for row in rows])
    np.testing.assert_allclose(np.linalg.norm(masked, axis=1), np.linalg.norm(rows, axis=1), rtol=1e-6)
    np.testing.assert_allclose(cosine_matrix(masked), cosine_matrix(rows), atol=1e-5)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(0, 1 << 20))
def test_the_split_of_masked_updates_is_the_split_of_the_clear_ones(seed: int, epoch: int) -> None:
    """Cfl Alg. 1 finds the same halves behind the mask, on two noisy groups of updates."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.arange(12) % 2)
    centres = rng.standard_normal((2, 500))
    rows = (centres[group] + 0.3 * rng.standard_normal((12, 500))).astype(np.float32)
    context = MaskContext("f", b"r", epoch, bytes(32), "permutation", (Segment("shared", 100), Segment("cluster", 400)))
    key = derive(MaskSecret.from_bytes(bytes(32)), context)
    clear = bipartition(cosine_matrix(rows))
    masked = bipartition(cosine_matrix([mask(row, key).values for row in rows]))
    assert (masked.left, masked.right) == (clear.left, clear.right)
    assert len(set(group[list(clear.left)])) == len(set(group[list(clear.right)])) == 1


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_different_epochs_permute_differently(first: int, second: int) -> None:
    """Two epochs agree on 64 coordinates only if they are the same epoch."""
    context = MaskContext("f", b"r", first, bytes(32), "permutation", (Segment("cluster", 64),))
    secret = MaskSecret.from_bytes(bytes(32))
    vector = np.arange(64, dtype=np.float32)
    one = mask(vector, derive(secret, context)).values
    other = mask(vector, derive(secret, dataclasses.replace(context, epoch=second))).values
    assert np.array_equal(one, other) == (first == second)
