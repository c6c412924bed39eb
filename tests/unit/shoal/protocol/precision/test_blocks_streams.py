"""Streams of a public seed."""

from __future__ import annotations

from shoal.protocol.precision.blocks import WINDOW, windows


def test_windows_cover_the_vector_once():
    spans = list(windows(2 * WINDOW + 5))
    assert [(s.start, s.stop) for s in spans] == [(0, WINDOW), (WINDOW, 2 * WINDOW), (2 * WINDOW, 2 * WINDOW + 5)]
    assert list(windows(0)) == []
