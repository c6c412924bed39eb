"""The demo's report on the terminal, with every figure and three images."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from shoal.demo.report import ConsoleProgress, report, round_words
from tests.helpers.demos import made

pytestmark = pytest.mark.torch


def test_the_report_holds_the_figures(capsys):
    report(made(8))
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert (
        lines[0]
        == "20 devices in 4 hidden groups, broker mosquitto, mask rotation (secret permutation, signs, Hadamard)"
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("fedavg", "cfl", "ifca"))}
    assert rows == {
        "fedavg": ["31.2", "%", "0.00", "1", "30", "0.123", "19.9", "21.5"],
        "cfl": ["92.5", "%", "1.00", "4", "60", "0.234", "20.1", "22.3"],
        "ifca": ["91.8", "%", "0.88", "5", "64", "0.346", "20.5", "124.0"],
    }
    assert "peak memory: device 72 MB (no torch), aggregator 301 MB" in lines
    assert "  cosine +0.031, coordinates in place 1.45 % (1 and 100 % would be the update)" in lines
    assert "PSNR 120 dB" in out
    assert "PSNR 7.2 dB" in out
    assert lines[-1].startswith("next: docs/tutorial.md")


def test_final_round_has_a_test_accuracy():
    record = {"clusters": dict.fromkeys(("dev-0", "dev-1"), 0), "loss": 1.42, "final": True, "correct": 3, "tested": 8}
    assert round_words(record) == "one cluster of 2, test accuracy 37.5 %"


@pytest.mark.parametrize(("side", "drawn"), [(8, 8), (28, 14)])
def test_the_three_images_stand_side_by_side(capsys, side, drawn):
    """True, read without the mask and with it: white, grey and blank, in columns of one width."""
    report(made(side))
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  true")) + 1
    width = max(2 * drawn, len("without the mask"))
    picture = lines[first : first + drawn]
    for line in picture:
        columns = line[2 : 2 + width].rstrip(), line[4 + width : 4 + 2 * width].rstrip(), line[6 + 2 * width :].strip()
        assert columns[0] == "@@" * drawn
        assert columns[1] in {c * 2 * drawn for c in "=+"}
        assert columns[2] == ""
    assert "PSNR" in lines[first + drawn]


def test_progress_is_lines_on_stderr(capsys):
    """The first and the last of a run are said, and not every one in between."""
    record = {"clusters": {"dev-0": 1, "dev-1": 1, "dev-2": 7}, "loss": 0.5, "final": False}
    with ConsoleProgress(round_words) as progress:
        progress.stage("starting the broker")
        progress.round("cfl", 0, 4, None)
        for done in (1, 2, 3, 4):
            progress.round("cfl", done, 4, record)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "starting the broker",
        "cfl: round 0 of 4, waiting for the devices",
        "cfl: round 4 of 4, clusters of 2+1, training loss 0.50",
    ]
