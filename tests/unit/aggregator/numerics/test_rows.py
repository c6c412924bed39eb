"""Updates as rows: their checks, their pieces, and the pages of files that are dropped while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.numerics import rows as rows_module
from aggregator.numerics.checks import NumericsError
from aggregator.numerics.rows import (
    BUFFER_BYTES,
    CHUNK_COLUMNS,
    FilePages,
    bad_rows,
    check_pair,
    check_rows,
    chunk_pairs,
    chunk_width,
    column_chunks,
    drop_pages,
    read_once,
)

WIDE = np.random.default_rng(5).standard_normal((7, 2 * CHUNK_COLUMNS + 333), dtype=np.float32)
FEW = WIDE[:2, :8]


class Pages(FilePages):
    """A mapping that counts how often its pages are dropped."""

    drops = 0

    def drop(self) -> None:
        """Count, and drop."""
        self.drops += 1
        super().drop()


def mapped(path: Path, rows: int, columns: int) -> tuple[Pages, list[NDArray[np.float32]]]:
    """Return a mapping of a file and its ``rows`` as views of it."""
    np.arange(rows * columns, dtype=np.float32).tofile(path)
    with path.open("r+b") as file:
        pages = Pages(file.fileno(), 0)
    whole = np.frombuffer(pages, np.float32).reshape(rows, columns)
    return pages, [whole[i] for i in range(rows)]


# --------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("updates", [FEW, list(FEW), np.asfortranarray(FEW), tuple(FEW)])
def test_shape_of_arrays_and_lists(updates: NDArray[np.float32]) -> None:
    """The shape of an array and of a list of vectors."""
    assert check_rows(updates, least=2) == (2, 8)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (FEW[0], "updates have shape (8,), not (n, d)"),
        (FEW[None], "updates have shape (1, 2, 8), not (n, d)"),
        ([FEW[0], FEW[1, :-1]], "updates have rows of shapes [(7,), (8,)], not one shape (d,)"),
        ([FEW, FEW], "updates have rows of shapes [(2, 8)], not one shape (d,)"),
        (FEW[:1], "1 updates, but at least 2 are needed"),
        ([], "0 updates, but at least 2 are needed"),
        (FEW[:, :0], "updates have no coordinates"),
        (FEW.astype(np.float64), "updates have dtype float64, not float32"),
        ([FEW[0], FEW[1].astype(np.float64)], "updates have dtype float32, float64, not float32"),
    ],
)
def test_rows_that_do_not_fit_are_refused(updates: NDArray[np.float32], message: str) -> None:
    with pytest.raises(NumericsError) as caught:
        check_rows(updates, least=2)
    assert str(caught.value) == message


def test_pair_needs_one_length() -> None:
    """A pair needs one length and at least one row each."""
    assert check_pair(FEW, FEW[:1]) == (2, 1)
    with pytest.raises(NumericsError, match=r"^updates have 8 coordinates, the other vectors 7$"):
        check_pair(FEW, FEW[:, :7])
    for pair in ((FEW[:0], FEW), (FEW, FEW[:0])):
        with pytest.raises(NumericsError, match="at least 1 are needed"):
            check_pair(*pair)


def test_bad_rows_are_given_by_position() -> None:
    rows = np.zeros((5, 3), np.float32)
    rows[1, 2], rows[3, 0], rows[4, 1] = np.nan, np.inf, -np.inf
    assert bad_rows(rows) == [1, 3, 4]
    assert bad_rows(list(rows)) == [1, 3, 4]
    assert bad_rows(FEW) == []


def test_an_array_is_read_as_views() -> None:
    pieces = list(column_chunks(WIDE))
    assert all(np.may_share_memory(piece, WIDE) for piece in pieces)
    assert [piece.shape[1] for piece in pieces] == [CHUNK_COLUMNS, CHUNK_COLUMNS, 333]


# --------------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("layout", ["list", "fortran", "strided", "reversed", "unaligned", "copied"])
def test_unfit_rows_are_copied_without_a_gap(layout: str) -> None:
    """Rows that a product can't use in place are copied without a gap."""
    made = {
        "list": list(WIDE),
        "fortran": np.asfortranarray(WIDE),
        "strided": np.repeat(WIDE, 2, axis=1)[:, ::2],
        "reversed": WIDE[::-1][::-1][::-1],
        "unaligned": np.frombuffer(b"x" + WIDE.tobytes(), np.float32, offset=1).reshape(WIDE.shape),
        "copied": WIDE,
    }[layout]
    expected = np.asarray(made)
    pieces = []
    for piece in column_chunks(made, copy=layout == "copied"):
        assert not any(np.may_share_memory(piece, row) for row in made)
        assert piece.flags.aligned
        pieces.append(piece.copy())
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), expected)


def test_buffer_of_scattered_rows_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of many rows is read in narrower pieces, and all of it is read."""
    monkeypatch.setattr(rows_module, "BUFFER_BYTES", 4 * 7 * 1000)
    pieces = [piece.copy() for piece in column_chunks(list(WIDE))]
    assert max(piece.shape[1] for piece in pieces) == 1000
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), WIDE)


def test_pages_are_dropped_by_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that fit in memory are dropped once and others with each piece."""
    pages, rows = mapped(tmp_path / "few", 3, 2 * CHUNK_COLUMNS)
    pieces = [piece.copy() for piece in column_chunks(rows)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), np.stack(rows))
    assert pages.drops == 1
    monkeypatch.setattr(rows_module, "RESIDENT_BYTES", 3 * (rows_module.FAULT_BYTES + 8 * CHUNK_COLUMNS) - 1)
    pieces = [piece.copy() for piece in column_chunks(rows)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), np.stack(rows))
    assert pages.drops == 3


@pytest.mark.parametrize(
    ("count", "length", "expected"),
    [
        (1, 100_000, CHUNK_COLUMNS),
        (1, 1000, 1000),
        (1, 10, 256),
        (BUFFER_BYTES // (4 * 1000), 100_000, 1000),
        (10_000_000, 100_000, 256),
    ],
)
def test_chunk_is_as_wide_as_the_buffer(count: int, length: int, expected: int) -> None:
    """A chunk is as wide as the buffer allows and never narrower than 256."""
    assert chunk_width(count, length) == expected


def test_pairs_are_cut_at_the_same_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger set decides, also if the other one could be read in wider pieces."""
    monkeypatch.setattr(rows_module, "BUFFER_BYTES", 4 * 7 * 5000)
    seen = 0
    for piece, other in chunk_pairs(WIDE, list(WIDE[:2])):
        np.testing.assert_array_equal(piece[:2], other)
        assert piece.shape[1] <= 5000
        seen += piece.shape[1]
    assert seen == WIDE.shape[1]


def test_pages_of_a_file_are_dropped_once(tmp_path: Path) -> None:
    """The pages of each file are dropped once however many rows it holds."""
    first, rows = mapped(tmp_path / "a", 4, 16)
    second, others = mapped(tmp_path / "b", 2, 16)
    drop_pages([*rows, others[0][3:9], np.zeros(4, np.float32)])
    assert (first.drops, second.drops) == (1, 1)
    assert rows[3][15] == 63.0, "the pages are read again"


def test_rows_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read in order and dropped each time that many bytes are in memory."""
    monkeypatch.setattr(rows_module, "FAULT_BYTES", 0)
    monkeypatch.setattr(rows_module, "RESIDENT_BYTES", 3 * 64)
    pages, rows = mapped(tmp_path / "a", 8, 16)
    drops = [(int(row[0]), pages.drops) for row in read_once(rows)]
    assert drops == [(0, 0), (16, 0), (32, 0), (48, 1), (64, 1), (80, 1), (96, 2), (112, 2)]
    assert pages.drops == 3, "those after the last full batch are dropped too"


def test_few_columns_hold_fewer_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of few columns holds fewer bytes."""
    monkeypatch.setattr(rows_module, "FAULT_BYTES", 0)
    monkeypatch.setattr(rows_module, "RESIDENT_BYTES", 3 * 64)

    def drops(columns: int | None) -> int:
        pages, rows = mapped(tmp_path / "a", 8, 16)
        readers: Iterator[NDArray[np.float32]] = read_once(rows, columns)
        for _ in readers:
            pass
        return pages.drops

    assert (drops(16), drops(8)) == (3, 2)


# ---------------------------------------------------------------------------------------------------------- pages
