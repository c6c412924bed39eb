"""The benchmark of a device's start: its figures and the lines that it prints."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from shoal_lab.bench import cli, starts
from shoal_lab.bench.starts import Start, StartFigures

from edge_client.learning.training import FIRST_STEP
from shoal.simulation.process_fleet import StageError

pytestmark = pytest.mark.torch
FIGURES = StartFigures(
    first=(Start(0.9, 0.8, 0.6), Start(0.5, 0.4, 0.3), Start(0.7, 0.6, 0.4)),
    again=(Start(0.4, 0.2, 0.1), Start(0.6, 0.5, 0.3), Start(0.5, 0.3, 0.2)),
    broker="mosquitto",
)


def test_the_figures_are_medians_with_each_start_beside_them():
    assert FIGURES.data() == {
        "seconds_first_median": 0.7,
        "seconds_first": [0.9, 0.5, 0.7],
        "seconds_to_loss_first_median": 0.6,
        "seconds_to_loss_first": [0.8, 0.4, 0.6],
        "cpu_seconds_to_loss_first_median": 0.4,
        "cpu_seconds_to_loss_first": [0.6, 0.3, 0.4],
        "seconds_again_median": 0.5,
        "seconds_again": [0.4, 0.6, 0.5],
        "seconds_to_loss_again_median": 0.3,
        "seconds_to_loss_again": [0.2, 0.5, 0.3],
        "cpu_seconds_to_loss_again_median": 0.2,
        "cpu_seconds_to_loss_again": [0.1, 0.3, 0.2],
        "starts": 3,
        "broker": "mosquitto",
    }


def test_the_lines(capsys):
    cli._show_starts(FIGURES.data())
    assert capsys.readouterr().out.splitlines() == [
        "fetching the run: 0.60 s to the first loss (0.40 s of CPU) (median of 3, 0.40 to 0.80)",
        "fetching the run: 0.70 s to the first update (median of 3, 0.50 to 0.90)",
        "with the run on its disk: 0.30 s to the first loss (0.20 s of CPU) (median of 3, 0.20 to 0.50)",
        "with the run on its disk: 0.50 s to the first update (median of 3, 0.40 to 0.60)",
    ]


class FakeStage:
    """A fleet in which a device that is started logs its first loss, and closes a round at the third look, or neither."""

    def __init__(self, folder, *, loss=True, update=True):
        self.looks, self.loss, self.update, self.started = 0, loss, update, []
        self.log = folder / "log"
        self.log.write_text(f"{FIRST_STEP} of an earlier start\n")

    def log_of(self, _name):
        return self.log

    def closed(self, _run):
        self.looks += 1
        return 1 if self.looks > 3 and self.update else 0

    def start_device(self, *arguments):
        self.started.append(arguments[0])
        if self.loss:
            self.log.write_text(f"{self.log.read_text()}{FIRST_STEP}\n")
        return self

    def cpu_s(self):
        return 0.25

    def tail(self):
        return "its last words"


def test_a_start_has_a_loss_and_ends_with_a_closed_round(monkeypatch, tmp_path):
    monkeypatch.setattr(starts, "SETTLE_S", 0.0)
    stage = FakeStage(tmp_path)
    start = starts._start(stage, 1, tmp_path)
    assert 0 < start.loss_s <= start.update_s < starts.WITHIN_S
    assert start.loss_cpu_s == 0.25
    assert stage.started == [starts.DEVICE]


@pytest.mark.parametrize(
    ("missing", "words"), [("loss", "no loss was logged"), ("update", "no round was closed")], ids=["loss", "update"]
)
def test_a_device_that_does_nothing_is_an_error_with_its_log(monkeypatch, tmp_path, missing, words):
    monkeypatch.setattr(starts, "SETTLE_S", 0.0)
    monkeypatch.setattr(starts, "WITHIN_S", 0.0)
    with pytest.raises(StageError, match=f"(?s){words}.*its last words"):
        starts._start(FakeStage(tmp_path, **{missing: False}), 1, tmp_path)
