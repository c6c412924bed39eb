"""The cost of a mask, and the computations that it allows."""

import pytest
from shoal_lab.bench.privacy.benchmark import measure_computed, measure_cost, measure_seal

from crypto.mask.modes.registry import MODES


def test_costs_of_masking_and_sealing():
    small, large = measure_cost("permutation", quick=True)
    assert (small["d"], large["d"], large["bytes"]) == (100_000, 1_000_000, 4_000_000)
    assert large["derive_ms"] > large["apply_ms"] > 0
    assert large["apply_memcpy_ratio"] > 1
    seal = measure_seal(quick=True)
    assert 0 < seal["bytes_added"] < 300
    assert 0 < seal["seal_ms_per_mb"] < 1000


@pytest.mark.torch
@pytest.mark.parametrize("mode", MODES)
def test_what_the_aggregator_can_compute(lab, mode):
    """All modes give cosines, means and CFL's split to 1e-6; only those that leave values in sight give more."""
    found = measure_computed(lab, mode)
    assert found["cosine_error"] < 1e-6
    assert found["mean_error"] < 1e-6
    needed = ["norms", "cosines", "mean", "cfl_split", "singular_values", "fedgroup_embedding", "distances_of_kmeans"]
    assert all(found["can"][name] for name in needed)
    assert found["can"]["sees_updates"] == (mode == "none")
    assert found["can"]["sees_values"] == (mode in ("none", "permutation"))
    assert found["can"]["sees_magnitudes"] == (mode != "rotation")
    assert found["can"]["sees_sparsity"] == (mode != "rotation")
    assert found["can"]["coordinate_median"] == (mode != "rotation")
