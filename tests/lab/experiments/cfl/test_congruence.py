"""cfl-congruence: the devices of both cases, and the norms that tell them apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shoal_lab.experiments.cfl import congruence as cfl_congruence
from shoal_lab.experiments.data.datasets import load

from shoal.errors import UsageError
from tests.helpers.studies import run

MLP = {"model": "mlp", "hidden": 16}


def test_congruent_devices_hold_other_digits(data_sets: Path) -> None:
    """One has 0 to 4, the other 5 to 9; incongruent ones hold all of them under two namings."""
    data = load("mnist", data_sets)
    low, high = cfl_congruence.population_of("congruent", data, 50, 1).train
    assert set(low.y) <= set(range(5))
    assert set(high.y) <= set(range(5, 10))
    other = cfl_congruence.population_of("incongruent", data, 200, 1)
    assert other.groups is not None
    assert set(other.groups) == {0, 1}
    assert all(len(set(s.y)) == 10 for s in other.train)
    with pytest.raises(UsageError, match="images of five digits"):
        cfl_congruence.population_of("congruent", data, 800, 1)


def test_norms_of_both_cases_are_reported(data_sets: Path) -> None:
    """The mean is never longer than the longest; gradients come every few rounds."""
    data = run("cfl-congruence", data_sets, samples=60, rounds=8, settings={**MLP, "gradients_every": 4})
    assert [r["round"] for r in data["history"]] == list(range(1, 9))
    for row in data["history"]:
        for case in cfl_congruence.CASES:
            assert 0 < row[f"norm_{case}_mean_updates"] <= row[f"norm_{case}_largest_updates"]
    assert [r["round"] for r in data["history"] if "norm_congruent_mean_gradients" in r] == [1, 5]
    assert set(data["at_the_end_congruent"]) == set(data["at_the_end_incongruent"])
    with pytest.raises(UsageError, match="two devices"):
        run("cfl-congruence", data_sets, devices=3)


def test_norms_are_those_of_eqs_32_and_33() -> None:
    """Opposed updates cancel in the mean; equal ones don't."""
    rows = np.array([[3, 4], [-3, -4]], np.float32)
    assert cfl_congruence._norms(rows, "updates") == {"mean_updates": 0.0, "largest_updates": 5.0}
    rows = np.array([[3, 4], [0, 0]], np.float32)
    assert cfl_congruence._norms(rows, "x") == {"mean_x": 2.5, "largest_x": 5.0}


def row(value: float, **more: float) -> dict[str, float]:
    return {"mean_updates": value, "largest_updates": 2 * value, "loss": value, **more}


def test_the_summary_is_of_the_last_tenth() -> None:
    """Twenty rounds: the last two, 4 and 2, over the largest, 10; gradients were measured in one of them."""
    rows = [row(10.0, mean_gradients=8.0, largest_gradients=8.0), *[row(1.0)] * 17]
    rows += [row(4.0), row(2.0, mean_gradients=2.0, largest_gradients=4.0)]
    assert cfl_congruence.summary(rows) == {
        "mean_updates": 0.3,
        "largest_updates": 0.3,
        "mean_gradients": 0.25,
        "largest_gradients": 0.5,
        "loss": 3.0,
    }


def test_missing_gradients_are_none() -> None:
    rows = [row(2.0, mean_gradients=8.0, largest_gradients=8.0), row(1.0)]
    found = cfl_congruence.summary(rows)
    assert found["mean_gradients"] is found["largest_gradients"] is None
    assert found["mean_updates"] == 0.5
