"""Figures that can't be drawn are refused before a long run; one that can is a picture."""

from __future__ import annotations

import sys

import pytest

from shoal.errors import ConfigError, UsageError
from shoal.report import plot


def test_places_are_checked_first(tmp_path):
    with pytest.raises(UsageError, match="names no kind of picture"):
        plot.check(tmp_path / "f.gif")
    with pytest.raises(UsageError, match="there is no folder"):
        plot.check(tmp_path / "none" / "f.png")


def test_panels_become_one_picture(tmp_path):
    line = plot.Line("a", [1, 2], [3.0, 4.0])
    panel = plot.Panel(title="t", x_label="x", y_label="y", lines=[line], levels={"l": 3.5}, marks=[1.5])
    plot.draw([panel, panel], tmp_path / "f.svg")
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")


def test_missing_matplotlib_has_a_hint(tmp_path, monkeypatch):
    """Without matplotlib the hint says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="figures need matplotlib") as caught:
        plot.check(tmp_path / "f.png")
    assert "pip install 'shoal[plot]'" in caught.value.hint
