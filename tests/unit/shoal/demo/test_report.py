"""Output of the demo: the fixed JSON object, and a report with every figure."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch")

from shoal.bench.rounds import RoundFigures
from shoal.demo.report import ConsoleProgress, report
from shoal.demo.runner import DemoResult, RunResult
from shoal.demo.seen import Reading, Seen

pytestmark = pytest.mark.torch
INTERFACE = {
    "broker": None,
    "devices": None,
    "groups": None,
    "runs": [
        dict.fromkeys(
            (
                "algorithm",
                "accuracy",
                "ari",
                "clusters",
                "rounds",
                "seconds_per_round",
                "bytes_up_per_device_round",
                "bytes_down_per_device_round",
                "mode",
            )
        )
    ],
    "device": {"rss_mb_max": None, "torch_loaded": None},
    "aggregator": {"rss_mb_max": None},
    "seen": dict.fromkeys(("cosine", "share_in_place", "reading_psnr_db_masked", "reading_psnr_db_none")),
}
RUNS = (
    RunResult("fedavg", 31.25, 0.0, 1, 30, 0.1234, 19876.0, 21543.0, "rotation"),
    RunResult("cfl", 92.5, 1.0, 4, 60, 0.2345, 20123.0, 22321.0, "rotation"),
    RunResult("ifca", 91.75, 0.875, 5, 64, 0.3456, 20456.0, 123987.0, "rotation"),
)


def made(side):
    """Return a result whose true image is white, whose masked reading is black, and whose clear one is half grey."""
    white = np.ones(side * side, np.float32)
    seen = Seen(0.0312, 0.0145, Reading(0 * white, 7.25), Reading(white / 2, 120.0), white)
    return DemoResult("mosquitto", 20, 4, RUNS, 71.6, False, 301.4, seen, side)


def shape(value):
    """Return the keys of a document, with None in place of every figure."""
    if isinstance(value, dict):
        return {k: shape(v) for k, v in value.items()}
    return [shape(value[0])] if isinstance(value, list) else None


def test_the_json_object_is_the_fixed_interface():
    """Programs read it: not a key more or less, in every run."""
    data = made(8).data()
    assert shape(data) == INTERFACE
    assert [shape(r) for r in data["runs"]] == INTERFACE["runs"] * 3
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_the_json_object_holds_the_figures():
    data = made(8).data()
    assert (data["broker"], data["devices"], data["groups"]) == ("mosquitto", 20, 4)
    assert data["runs"][1] == {
        "algorithm": "cfl",
        "accuracy": 92.5,
        "ari": 1.0,
        "clusters": 4,
        "rounds": 60,
        "seconds_per_round": 0.2345,
        "bytes_up_per_device_round": 20123.0,
        "bytes_down_per_device_round": 22321.0,
        "mode": "rotation",
    }
    assert data["device"] == {"rss_mb_max": 71.6, "torch_loaded": False}
    assert data["aggregator"] == {"rss_mb_max": 301.4}
    assert data["seen"] == {
        "cosine": 0.0312,
        "share_in_place": 0.0145,
        "reading_psnr_db_masked": 7.25,
        "reading_psnr_db_none": 120.0,
    }


def test_the_report_holds_the_figures(capsys):
    report(made(8))
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "20 devices in 4 hidden groups, broker mosquitto, mask rotation"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("fedavg", "cfl", "ifca"))}
    assert rows == {
        "fedavg": ["31.2", "%", "0.00", "1", "30", "0.123", "19.9", "21.5"],
        "cfl": ["92.5", "%", "1.00", "4", "60", "0.234", "20.1", "22.3"],
        "ifca": ["91.8", "%", "0.88", "5", "64", "0.346", "20.5", "124.0"],
    }
    assert "peak memory: device 72 MB (no torch), aggregator 301 MB" in lines
    assert "  cosine +0.031, coordinates in place 1.45 %" in lines
    assert "PSNR 120 dB" in out
    assert "PSNR 7.2 dB" in out


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


def test_without_a_terminal_progress_is_lines_on_stderr(capsys):
    """The first and the last of a run are said, and not every one in between."""
    record = {"clusters": {"dev-0": 1, "dev-1": 1, "dev-2": 7}, "loss": 0.5}
    with ConsoleProgress() as progress:
        progress.stage("starting the broker")
        progress.round("cfl", 0, 4, None)
        for done in (1, 2, 3, 4):
            progress.round("cfl", done, 4, record)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "starting the broker",
        "cfl: round 0 of 4, waiting for the devices",
        "cfl: round 4 of 4, clusters 2+1, loss 0.50",
    ]


def test_the_round_benchmark_says_its_mode():
    """As every report does."""
    figures = RoundFigures(
        seconds=(0.1, 0.2, 0.3),
        training_s=0.01,
        cores=2,
        devices=10,
        model_bytes=636_040,
        broker="mosquitto",
        mode="permutation",
        device_rss_mb_max=80.0,
        aggregator_rss_mb_max=300.0,
    )
    assert figures.data()["mode"] == "permutation"
    assert figures.data()["seconds_per_round_median"] == 0.2
    assert figures.data()["seconds_bound_by_training"] == pytest.approx(0.05)
    assert figures.data()["bound_ratio"] == pytest.approx(4.0)


def test_more_cores_than_devices_do_not_shorten_a_training() -> None:
    figures = RoundFigures(
        seconds=(0.1,),
        training_s=0.01,
        cores=64,
        devices=10,
        model_bytes=636_040,
        broker="mosquitto",
        mode="permutation",
        device_rss_mb_max=80.0,
        aggregator_rss_mb_max=300.0,
    )
    assert figures.bound_s == pytest.approx(0.01)
