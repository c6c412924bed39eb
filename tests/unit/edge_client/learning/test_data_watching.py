"""A watch over data files: it notices every change of a file, and bounds the bytes that are read again."""

from __future__ import annotations

import os

import pytest

from edge_client.learning import data
from edge_client.learning.data import FilesSeen, watch_of
from shoal.errors import DataError


def test_growth_and_replacement_are_noticed(tmp_path):
    """Growth new files and replacement are noticed."""
    path = tmp_path / "a.csv"
    path.write_text("1,2,0\n")
    look = watch_of(tmp_path)
    first = look()
    assert look() == first
    assert first.total_bytes == 6
    with path.open("a") as file:
        file.write("3,4,1\n")
    second = look()
    assert second != first
    (tmp_path / "b.csv").write_text("5,6,1\n")
    third = look()
    assert len(third.files) == 2
    os.utime(path, ns=(1, 1))
    assert look() != third


def test_images_are_looked_at_one_by_one(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"12345")
    look = watch_of(tmp_path)
    assert look().total_bytes == 5
    (tmp_path / "cat" / "2.png").write_bytes(b"12")
    assert look().total_bytes == 7


def test_data_that_are_gone_are_an_error(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        watch_of(tmp_path / "none.csv")()


def test_bytes_read_again_are_bounded(monkeypatch):
    """The bytes that are read again are bounded."""
    monkeypatch.setattr(data, "MAX_WATCHED_BYTES", 9)
    FilesSeen((("a", 4, 0), ("b", 5, 0))).check_size()
    with pytest.raises(DataError, match="have grown to 10 bytes, more than the 9 that are read again") as caught:
        FilesSeen((("a", 10, 0),)).check_size()
    assert "restart" in caught.value.hint
