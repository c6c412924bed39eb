"""The kernel benchmark runs and reports every kernel; no time is asserted."""

from __future__ import annotations

import math

from benchmarks.numerics import measure


def test_quick_measurement_covers_every_kernel() -> None:
    results = measure(quick=True)
    assert [result.name for result in results] == ["gram", "mean", "bipartition", "mask", "unmask", "derive"]
    for result in results:
        for value in (result.seconds, result.ceiling_ratio, result.naive_ratio):
            assert math.isfinite(value)
            assert value > 0
