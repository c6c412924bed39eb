"""The benchmark of a device's start: its figures and the lines that it prints."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from shoal import cli
from shoal.bench import starts
from shoal.bench.starts import StartFigures
from shoal.simulation.process_fleet import StageError

pytestmark = pytest.mark.torch
FIGURES = StartFigures(first_s=(0.9, 0.5, 0.7), again_s=(0.4, 0.6, 0.5), broker="mosquitto")


def test_the_figures_are_medians_with_each_start_beside_them():
    assert FIGURES.data() == {
        "seconds_first_median": 0.7,
        "seconds_first": [0.9, 0.5, 0.7],
        "seconds_again_median": 0.5,
        "seconds_again": [0.4, 0.6, 0.5],
        "starts": 3,
        "broker": "mosquitto",
    }


def test_the_lines(capsys):
    cli._show_starts(FIGURES.data())
    assert capsys.readouterr().out.splitlines() == [
        "fetching the run: 0.70 s to the first update (median of 3, 0.50 to 0.90)",
        "with the run on its disk: 0.50 s to the first update (median of 3, 0.40 to 0.60)",
    ]


class FakeStage:
    """A fleet in which a round is closed at the third look, or never."""

    def __init__(self, never=False):
        self.looks, self.never, self.started = 0, never, []

    def records(self, _run):
        self.looks += 1
        return [{}] if self.looks > 3 and not self.never else []

    def start_device(self, *arguments):
        self.started.append(arguments[0])
        return self

    def tail(self):
        return "its last words"


def test_a_start_ends_with_a_closed_round(monkeypatch, tmp_path):
    monkeypatch.setattr(starts, "SETTLE_S", 0.0)
    stage = FakeStage()
    assert 0 < starts._seconds_to_an_update(stage, 1, tmp_path) < starts.WITHIN_S
    assert stage.started == [starts.DEVICE]


def test_a_device_that_sends_nothing_is_an_error_with_its_log(monkeypatch, tmp_path):
    monkeypatch.setattr(starts, "SETTLE_S", 0.0)
    monkeypatch.setattr(starts, "WITHIN_S", 0.0)
    with pytest.raises(StageError, match="its last words"):
        starts._seconds_to_an_update(FakeStage(never=True), 1, tmp_path)
