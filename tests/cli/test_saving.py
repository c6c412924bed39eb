"""`--save` and `--html`: refused before the work where nothing can be written, and no reason to lose the figures after it."""

from __future__ import annotations

import pytest

from tests.cli.test_simulate import data_of, shoal
from tests.cli.toy_study import REMOVE


@pytest.mark.parametrize(
    "command",
    [
        ("demo", "--save"),
        *(("bench", name, "--save") for name in ("round", "load", "numerics", "privacy")),
        ("bench", "privacy", "--html"),
        ("simulate", "toy", "--save"),
    ],
)
def test_missing_folder_is_refused_first(tmp_path, command):
    """A file in no folder is refused before the work."""
    done = shoal(*command, tmp_path / "none" / "x.json", status=2)
    assert done.out == ""
    assert f"error: there is no folder {tmp_path}/none for {command[-1]}\nhint: " in done.err


def test_unwritable_folder_is_refused_first():
    """A folder that can't be written is refused before the work."""
    assert "error: can't write --save /proc/x.json" in shoal("simulate", "toy", "--save", "/proc/x.json", status=2).err


def test_vanished_folder_still_prints(tmp_path):
    """A simulation whose folder goes away is printed all the same."""
    (tmp_path / "out").mkdir()
    arguments = ("simulate", "toy", "--save", tmp_path / "out" / "x.json", "--json")
    done = shoal(*arguments, status=3, **{REMOVE: str(tmp_path / "out")})
    assert data_of(done)["accuracy"] == 53.0
    assert "error: can't write" in done.err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_failed_figure_costs_no_results(tmp_path, form):
    """A figure that can't be drawn costs no results."""
    (tmp_path / "out").mkdir()
    arguments = ("simulate", "toy", "--plot", tmp_path / "out" / "x.png", *form)
    done = shoal(*arguments, status=3, **{REMOVE: str(tmp_path / "out")})
    assert (data_of(done)["accuracy"] == 53.0) if form else ("53.0" in done.out)
    assert "error: there is no folder" in done.err


def test_unwritable_figure_is_refused_first():
    """A figure where nothing can be written is refused before the work."""
    done = shoal("simulate", "toy", "--plot", "/proc/x.png", status=2)
    assert (done.out, "error: can't write --plot /proc/x.png" in done.err) == ("", True)
