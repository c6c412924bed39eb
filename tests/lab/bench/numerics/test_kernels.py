"""The kernel benchmark runs every kernel, and its naive forms compute the same as the fast ones; no time is asserted."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from shoal_lab.bench.numerics.kernels import (
    Bench,
    cubic_madc,
    measure_training,
    randomised_edc,
    training_flops,
    union_find,
    words,
)

from aggregator.numerics.embedding import edc, madc
from tests.helpers.trees import python

NAMES = ["gram", "edc", "madc", "madc_torch", "mean", "bipartition", "mask", "unmask", "derive"]
NAMES += ["simulator"] * 2


@pytest.mark.long
def test_quick_measurement_has_all_kernels():
    """As a person gets it: `shoal bench numerics --quick --json`."""
    done = python("from shoal.cli import main; main()", "bench", "numerics", "--quick", "--json", timeout=150)
    kernels = json.loads(done.stdout)["data"]["kernels"]
    assert [kernel["name"] for kernel in kernels] == NAMES
    for kernel in kernels:
        assert set(kernel) == {"name", "n", "d", "seconds", "ceiling_ratio", "naive_ratio"}
        assert all(
            math.isfinite(kernel[name]) and kernel[name] > 0 for name in ("seconds", "ceiling_ratio", "naive_ratio")
        )
    assert len(words({"kernels": kernels})) == 1 + len(NAMES)


def test_race_gives_each_function_its_time():
    """A race gives each function its own time."""
    calls = []
    slow = np.random.default_rng(0).standard_normal(2_000_000)
    fast_s, slow_s = Bench(quick=True).race(lambda: calls.append(1), slow.sum, runs=2)
    assert calls
    assert fast_s < slow_s


def test_the_naive_forms_compute_the_same():
    bench = Bench(quick=True)
    similarity = bench.similarity(40)
    np.testing.assert_allclose(cubic_madc(similarity, 5, 9), madc(similarity)[5:9], atol=1e-12)
    assert union_find(similarity) == 2
    centres = bench.normal(3, 500)
    rows = centres[np.arange(20) % 3] + np.float32(0.1) * bench.normal(20, 500)
    np.testing.assert_allclose(np.abs(randomised_edc(rows, 3)), np.abs(edc(rows, 3)), atol=1e-3)


@pytest.mark.torch
def test_the_simulators_training():
    """Ten steps of a device with one sample: two products with W1, three with W2, two operations a weight."""
    assert training_flops(1, 1) == 10 * (2 * 2 * 784 * 200 + 3 * 2 * 200 * 10)
    found = measure_training(20, 4, 1)
    assert (found["name"], found["n"]) == ("simulator", 20)
    assert min(found["seconds"], found["ceiling_ratio"], found["naive_ratio"]) > 0
