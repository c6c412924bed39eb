"""The streaming Gram matrix and the running mean, on every backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aggregator.numerics.averaging import StreamingMean
from aggregator.numerics.errors import NumericsError
from aggregator.numerics.rows import CHUNK_COLUMNS
from aggregator.numerics.similarity import gram
from aggregator.numerics.streaming import BLOCK_ROWS, StreamingGram
from tests.helpers.backends import BACKENDS, make

N = 2 * BLOCK_ROWS + 7
ROWS = np.random.default_rng(5).standard_normal((N, CHUNK_COLUMNS + 99), dtype=np.float32)
D = ROWS.shape[1]
TOLERANCE = 1e-6 * float((ROWS.astype(np.float64) ** 2).sum(axis=1).max())


@pytest.mark.parametrize("name", BACKENDS)
def test_the_stream_equals_the_gram_matrix(name: str) -> None:
    """Over full blocks and a rest, within 1e-6 of the vectors' lengths."""
    stream = StreamingGram(D, N + 3, backend=make(name))
    assert [stream.add(row) for row in ROWS] == list(range(N))
    found = stream.result()
    assert found.shape == (N, N)
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found, gram(ROWS), atol=TOLERANCE)


@pytest.mark.parametrize("count", [1, 2, BLOCK_ROWS, BLOCK_ROWS + 1])
def test_any_number_of_rows(count: int) -> None:
    wide = ROWS[:count].astype(np.float64)
    stream = StreamingGram(D, N)
    for row in ROWS[:count]:
        stream.add(row)
    assert len(stream) == count
    np.testing.assert_allclose(stream.result(), wide @ wide.T, atol=TOLERANCE)


def test_rows_on_the_disk(tmp_path: Path) -> None:
    """As memory maps that the caller made, and copied into a memory map."""
    ROWS.tofile(tmp_path / "given.f32")
    given = np.memmap(tmp_path / "given.f32", dtype=np.float32, mode="r", shape=ROWS.shape)
    store = np.memmap(tmp_path / "store.f32", dtype=np.float32, mode="w+", shape=ROWS.shape)
    from_maps, into_map = StreamingGram(D, N), StreamingGram(D, N, store=store)
    for row in given:
        from_maps.add(row)
        into_map.add(row)
    np.testing.assert_allclose(from_maps.result(), gram(ROWS), atol=TOLERANCE)
    np.testing.assert_allclose(into_map.result(), gram(ROWS), atol=TOLERANCE)
    np.testing.assert_array_equal(store, ROWS)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("position", [3, N - 1])
def test_row_is_replaced_at_any_time(position: int, stored: bool) -> None:
    """A row can be replaced before and after its block."""
    stream = StreamingGram(D, N, store=np.empty_like(ROWS) if stored else None)
    for row in ROWS:
        stream.add(row)
    changed = ROWS.copy()
    changed[position] = ROWS[0] - ROWS[1]
    stream.replace(position, changed[position])
    np.testing.assert_allclose(stream.result(), gram(changed), atol=4 * TOLERANCE)


def test_bad_rows_can_be_replaced() -> None:
    """Bad rows are named and can be replaced."""
    stream = StreamingGram(D, N)
    for position, row in enumerate(ROWS):
        bad = row.copy()
        bad[9] = np.nan
        stream.add(bad if position == 4 else row)
    with pytest.raises(NumericsError, match=r"\[4\]"):
        stream.result()
    stream.replace(4, ROWS[4])
    np.testing.assert_allclose(stream.result(), gram(ROWS), atol=TOLERANCE)


def test_rows_that_do_not_fit_are_refused() -> None:
    stream = StreamingGram(4, 1)
    with pytest.raises(NumericsError, match="no rows"):
        stream.result()
    for row in (np.zeros(5, np.float32), np.zeros(4), np.zeros((1, 4), np.float32)):
        with pytest.raises(NumericsError, match="row has shape"):
            stream.add(row)
    stream.add(np.ones(4, np.float32))
    with pytest.raises(NumericsError, match="1 rows already"):
        stream.add(np.ones(4, np.float32))
    with pytest.raises(NumericsError, match="position 1"):
        stream.replace(1, np.ones(4, np.float32))
    with pytest.raises(NumericsError, match="store has shape"):
        StreamingGram(4, 2, store=np.zeros((1, 4), np.float32))
    with pytest.raises(NumericsError, match="up to 0 rows"):
        StreamingGram(4, 0)
    np.testing.assert_array_equal(stream.result(), [[4.0]])


@pytest.mark.parametrize("name", BACKENDS)
def test_running_mean_has_the_same_bits(name: str) -> None:
    """The running mean has the same bits on every backend."""
    weights = np.random.default_rng(6).integers(0, 700, N).astype(np.float64)
    here, there = StreamingMean(D), make(name).running_mean(D)
    for row, weight in zip(ROWS, weights, strict=True):
        here.add(row, weight)
        there.add(row, weight)
    assert (there.count, there.total_weight) == (N, weights.sum())
    assert there.result().tobytes() == here.result().tobytes()
    assert make(name).weighted_mean(ROWS, weights).tobytes() == here.result().tobytes()
    with pytest.raises(NumericsError, match="float32"):
        there.add(np.zeros(D))
    with pytest.raises(NumericsError, match="weight is -1"):
        there.add(ROWS[0], -1.0)
    with pytest.raises(NumericsError, match="positive weight"):
        make(name).running_mean(3).result()
    with pytest.raises(NumericsError, match="0 coordinates"):
        make(name).running_mean(0)
