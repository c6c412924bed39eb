"""Streams of a public seed."""

from __future__ import annotations

from shoal.protocol.precision.streams import WINDOW, fractions, stream, windows


def test_windows_cover_the_vector_once():
    spans = list(windows(2 * WINDOW + 5))
    assert [(s.start, s.stop) for s in spans] == [(0, WINDOW), (WINDOW, 2 * WINDOW), (2 * WINDOW, 2 * WINDOW + 5)]
    assert list(windows(0)) == []


def test_streams_differ_by_their_inputs():
    """Streams differ by seed purpose and window."""
    found = {stream(*at, 16).tobytes() for at in ((b"a", b"x", 0), (b"b", b"x", 0), (b"a", b"y", 0), (b"a", b"x", 1))}
    assert len(found) == 4


def test_fractions_are_uniform():
    found = fractions(b"s", 0, WINDOW)
    assert 0 < found.min() < 0.001
    assert 0.999 < found.max() < 1
    assert abs(found.mean() - 0.5) < 0.01
