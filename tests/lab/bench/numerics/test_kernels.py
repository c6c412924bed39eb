"""The kernel benchmark runs and reports every kernel, and its naive forms are right; no time is asserted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shoal_lab.bench.numerics.kernels import Bench

ROOT = Path(__file__).parents[5]
NAMES = ["gram", "streaming_gram", "edc", "madc", "madc_torch", "mean", "bipartition", "mask", "unmask", "derive"]
NAMES += ["simulator"] * 2


@pytest.mark.long
def test_quick_measurement_covers_every_kernel() -> None:
    """As a person gets it: `shoal bench numerics --quick --json`."""
    done = subprocess.run(
        [sys.executable, "-c", "from shoal.cli import main; main()", "bench", "numerics", "--quick", "--json"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=150,
    )
    kernels = json.loads(done.stdout)["data"]["kernels"]
    assert [kernel["name"] for kernel in kernels] == NAMES
    for kernel in kernels:
        assert set(kernel) == {"name", "n", "d", "seconds", "ceiling_ratio", "naive_ratio"}
        for value in (kernel["seconds"], kernel["ceiling_ratio"], kernel["naive_ratio"]):
            assert math.isfinite(value)
            assert value > 0


def test_a_race_gives_each_function_its_own_time() -> None:
    calls = []
    slow = np.random.default_rng(0).standard_normal(2_000_000)
    fast_s, slow_s = Bench(quick=True).race(lambda: calls.append(1), slow.sum, runs=2)
    assert calls
    assert fast_s < slow_s
