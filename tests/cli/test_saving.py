"""`--save` and `--html`: refused before the work where nothing can be written, and no reason to lose the figures after it."""

from __future__ import annotations

import pytest

from tests.cli.test_simulate import data_of, shoal
from tests.helpers.toy_study import REMOVE


@pytest.mark.parametrize(
    "command",
    [
        ("demo", "--save"),
        *(("bench", name, "--save") for name in ("round", "aggregator", "numerics", "privacy")),
        ("bench", "privacy", "--html"),
        ("simulate", "toy", "--save"),
    ],
)
def test_a_file_in_no_folder_is_refused_before_the_work(tmp_path, command):
    done = shoal(*command, tmp_path / "none" / "x.json", status=2)
    assert done.out == ""
    assert f"error: there is no folder {tmp_path}/none for {command[-1]}\nhint: " in done.err


def test_a_folder_that_can_not_be_written_is_refused_before_the_work():
    assert "error: can't write --save /proc/x.json" in shoal("simulate", "toy", "--save", "/proc/x.json", status=2).err


def test_a_simulation_whose_folder_goes_away_is_printed_all_the_same(tmp_path):
    (tmp_path / "out").mkdir()
    arguments = ("simulate", "toy", "--save", tmp_path / "out" / "x.json", "--json")
    done = shoal(*arguments, status=3, **{REMOVE: str(tmp_path / "out")})
    assert data_of(done)["accuracy"] == 53.0
    assert "error: can't write" in done.err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_figure_that_can_not_be_drawn_costs_no_results(tmp_path, form):
    (tmp_path / "out").mkdir()
    arguments = ("simulate", "toy", "--plot", tmp_path / "out" / "x.png", *form)
    done = shoal(*arguments, status=3, **{REMOVE: str(tmp_path / "out")})
    assert (data_of(done)["accuracy"] == 53.0) if form else ("53.0" in done.out)
    assert "error: there is no folder" in done.err


def test_a_figure_where_nothing_can_be_written_is_refused_before_the_work():
    done = shoal("simulate", "toy", "--plot", "/proc/x.png", status=2)
    assert (done.out, "error: can't write --plot /proc/x.png" in done.err) == ("", True)
