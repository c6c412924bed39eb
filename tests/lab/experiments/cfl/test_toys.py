"""cfl-toys: CFL on toys that no single model fits."""

from __future__ import annotations

from typing import Any

import pytest
from shoal_lab.experiments.cfl import toys as cfl_toys

from tests.helpers.studies import run


@pytest.fixture(scope="module")
def toys() -> dict[str, Any]:
    return run("cfl-toys")


@pytest.mark.slow
@pytest.mark.parametrize("name", cfl_toys.TOYS)
def test_one_line_fits_no_toy(toys: dict[str, Any], name: str) -> None:
    """FedAvg stays far below the accuracy of a line for each group."""
    toy = toys[f"toy_{name}"]
    assert toy["ari"] == 1.0
    assert toy["clusters"] == 2
    assert toy["accuracy"] > 97
    assert toy["accuracy_fedavg"] < 80


def test_norms_tell_congruent_paths(toys: dict[str, Any]) -> None:
    """Both paths end at a stationary point; only the incongruent devices still pull, in opposite directions (Eq. 13)."""
    apart, together = toys["path_incongruent"], toys["path_congruent"]
    assert apart["mean_gradient"] < 1e-3
    assert together["mean_gradient"] < 1e-3
    assert apart["largest_gradient"] > 0.5
    assert not apart["congruent"]
    assert apart["cosine"] == pytest.approx(-1.0, abs=1e-3)
    assert together["congruent"]
