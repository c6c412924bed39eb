"""cfl-toys: CFL on toys that no single model fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shoal_lab.experiments.cfl import toys as cfl_toys
from shoal_lab.experiments.figures import panels_of, plot

from shoal.errors import UsageError
from tests.helpers.studies import run


@pytest.fixture(scope="module")
def toys(once: Callable[..., Any]) -> Any:
    return once("cfl-toys", lambda: run("cfl-toys"))


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


@pytest.mark.slow
def test_the_pictures_are_drawn(toys: dict[str, Any], tmp_path: Path) -> None:
    """Four panels, dots for points and lines for borders and paths."""
    panels = panels_of([toys], "panels")
    assert len(panels) == 4
    assert {line.dots for line in panels[0].lines} == {True, False}
    assert not any(line.dots for line in panels[2].lines)
    plot([toys], tmp_path / "toys.png", "panels")
    assert (tmp_path / "toys.png").stat().st_size > 10_000


def test_a_toy_needs_two_devices_a_group() -> None:
    """A side of a split has two devices at least."""
    with pytest.raises(UsageError, match="no two groups"):
        run("cfl-toys", devices=3)
