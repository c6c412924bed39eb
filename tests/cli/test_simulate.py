"""`shoal simulate` as a person calls it: the table, the one JSON object, the figure, the refusals, and the way out."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.toy_study import REMOVE
from tests.helpers.calls import call
from tests.helpers.trees import ONE_THREAD, ROOT, python

TOY = "tests.cli.toy_study"


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    """No data set of this machine is in the way."""
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def shoal(*arguments, status=0, cwd=ROOT, **environment):
    """Call `shoal` with the toy registered, and return its status and output."""
    done = call(TOY, list(map(str, arguments)), cwd, {**os.environ, **ONE_THREAD, **environment})
    assert done.status == status, done.err
    assert "Traceback" not in done.err
    return done


def data_of(done):
    """Return the data of the one JSON object on stdout."""
    (line,) = done.out.splitlines()
    document = json.loads(line)
    assert (document["schema"], document["ok"]) == (1, True)
    return document["data"]


def test_result_is_one_object():
    """Algorithm, seed and mask default to the experiment's first, 0 and permutation; not a word on stderr."""
    done = shoal("simulate", "toy", "--json")
    data = data_of(done)
    assert {"experiment", "algorithm", "accuracy", "purity", "ari", "clusters", "rounds"} <= set(data)
    assert (data["experiment"], data["algorithm"], data["accuracy"], data["published"]) == ("toy", "ifca", 53.0, 95.25)
    assert (data["gap"], data["cpu_seconds_per_round"]) == (0.125, 0.01)
    assert [set(row) for row in data["history"]] == [{"round", "accuracy", "loss", "purity"}] * 3
    assert (data["parameters"]["seed"], data["parameters"]["mask"]) == (0, "permutation")
    assert done.err == ""


def test_every_option_reaches_the_experiment():
    given = (
        "--algorithm fedavg --devices 8 --samples 50 --rounds 2 --seed 7 --mask none --data-dir /somewhere --grid paper"
    )
    data = data_of(
        shoal("simulate", "toy", *given.split(), "--set", "discrepancy=on", "--set", " pause_s = 0", "--json")
    )
    assert (data["algorithm"], data["rounds"]) == ("fedavg", 2)
    assert data["parameters"] == {
        "devices": 8,
        "samples": 50,
        "rounds": 2,
        "seed": 7,
        "mask": "none",
        "grid": "paper",
        "device": "cpu",
        "data_dir": "/somewhere",
        "pause_s": 0.0,
        "settings": {"discrepancy": "on"},
    }


def test_table_has_the_published_number(tmp_path):
    """The table has the published number beside ours, and all runs every algorithm; the figure is drawn."""
    made = ("simulate", "toy", "--algorithm", "all")
    lines = shoal(*made, "--plot", tmp_path / "toy.png").out.splitlines()
    assert lines[0] == "toy: a toy (a paper, table 1); seed 0, mask permutation"
    (row,) = (line.split() for line in lines if line.startswith("ifca "))
    assert row == ["ifca", "53.00", "-", "95.25", "1.000", "0.500", "2", "3", "0.010"]
    assert {"  published: a 1, b 2.5", "  gap: 0.125", "  clusters_seen: 1, 2"} <= set(lines)
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert [r["algorithm"] for r in data_of(shoal(*made, "--json"))["results"]] == ["ifca", "fedavg"]


def test_result_is_saved_with_its_origin(tmp_path):
    """The result is saved with where it is from."""
    shoal("simulate", "toy", "--seed", "3", "--save", tmp_path / "toy.json", "--json")
    saved = json.loads((tmp_path / "toy.json").read_text())
    assert saved["command"][:5] == ["shoal", "simulate", "toy", "--seed", "3"]
    assert {"commit", "date", "machine"} <= set(saved)
    assert saved["data"]["parameters"]["seed"] == 3


def test_the_list_says_what_each_needs(tmp_path, no_data):
    """Every experiment with its algorithms; data that is not here is said to be missing."""
    made = shoal("simulate", "--list", "--json", "--data-dir", tmp_path)
    entries = {e["id"]: e for e in data_of(made)["experiments"]}
    assert len(entries) == 22
    assert entries["toy"]["needs"] == ["mnist"]
    assert entries["toy"]["algorithms"] == ["ifca", "fedavg"]
    assert entries["toy"]["published"]["ifca"] == 95.25
    assert "cifar10" in entries["ifca-rotated-cifar"]["missing"]
    text = shoal("simulate", "--list").out
    assert "ifca-rotated-mnist" in text
    assert "cifar10, which is not here" in text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "which experiment?\nhint: shoal simulate --list names them"),
        (["cfl-news2"], "no experiment 'cfl-news2'\nhint: do you mean cfl-news? there are cfl-congruence, "),
        (["toy", "--algorithm", "sgd"], "toy has no algorithm 'sgd'\nhint: there are fedavg, ifca"),
        (["toy", "--mask", "rot13"], "no mask 'rot13'\nhint: there are none, permutation, "),
        (["toy", "--grid", "huge"], "no grid 'huge'\nhint: there are default, paper"),
        (["toy", "--device", "tpu"], "no device 'tpu'\nhint: do you mean cpu? there are cpu, cuda"),
        (["toy", "--plot", "toy.gif"], "toy.gif names no kind of picture\nhint: end it in .png"),
        (["toy", "--set", "eps1"], "'eps1' is not NAME=VALUE\nhint: write eps1=VALUE"),
        (["toy", "--set", "pause_s=x"], "--set pause_s=x: it takes a number\nhint: the default is pause_s=0.0"),
        (["toy", "--set", "pause=1"], "toy has no setting 'pause' with ifca\nhint: do you mean pause_s?"),
        (["toy", "--save", "/no/such/folder/x.json"], "there is no folder /no/such/folder for --save"),
        (["toy", "--save", "/proc/x.json"], "can't write --save /proc/x.json"),
        (["toy", "--plot", "/proc/x.png"], "can't write --plot /proc/x.png"),
        (["wild"], "which scenario?\nhint: shoal simulate wild --list"),
        (["wild", "--scenario", "alik"], "wild has no scenario 'alik'\nhint: do you mean alike? there are "),
        (["toy", "--scenario", "x"], "toy has no scenario 'x'\nhint: there are none"),
        (["wild", "--scenario", "alike", "--devices", "5"], "a scenario fixes the number of devices"),
    ],
)
def test_usage_errors(arguments, error):
    """Status 2, before anything runs."""
    done = shoal("simulate", *arguments, status=2)
    assert f"error: {error}" in done.err
    assert done.out == ""


@pytest.mark.parametrize(("option", "value"), [("--devices", "0"), ("--seed", "-1")])
def test_number_out_of_range(option, value):
    assert option in shoal("simulate", "toy", option, value, status=2).err


def test_absent_data_is_status_8(tmp_path, no_data):
    """The error names the file and the places, the hint the way to get it."""
    done = shoal("simulate", "needy", "--data-dir", tmp_path, "--json", status=8)
    error = json.loads(done.out)["error"]
    assert error["type"] == "MissingDataError"
    assert "data_batch_1.bin is missing" in error["message"]
    assert str(tmp_path) in error["message"]
    assert "cifar-10-binary.tar.gz" in error["hint"]


def test_scenarios_are_listed_by_kind(tmp_path, no_data):
    """Each with its data and network; data that is not here is said to be missing."""
    lines = shoal("simulate", "wild", "--list", "--data-dir", tmp_path).out.splitlines()
    assert lines[0] == "clear groups of equal size:"
    assert any(line.split()[0] == "rotated-4" and "mnist is not here" in line for line in lines)
    rows = data_of(shoal("simulate", "wild", "--list", "--json", "--data-dir", tmp_path))["scenarios"]
    (wine,) = (row for row in rows if row["name"] == "table-wine")
    assert (wine["data"], wine["network"], wine["missing"]) == ("wine", "linear", [])


@pytest.mark.long
def test_a_scenario_runs_with_every_strategy(tmp_path, no_data):
    """The table has mean and worst device, the JSON object the fixed names, and the figure is drawn."""
    arguments = ["simulate", "wild", "--scenario", "table-wine", "--rounds", "2"]
    lines = shoal(*arguments, "--strategy", "all", "--plot", tmp_path / "wine.png").out.splitlines()
    assert lines[0].startswith("wild: three labels shifted on half of the devices (ours, docs/wild-fleets.md); seed 0")
    assert lines[3].split() == ["strategy", "mean", "worst", "mean", "worst", "ARI", "clusters", "rounds"]
    assert [line.split()[0] for line in lines[4:12]] == [
        *("cfl", "ifca", "fedgroup", "fesem", "one-shot", "fedavg", "local", "true-groups"),
    ]
    assert (tmp_path / "wine.png").read_bytes().startswith(b"\x89PNG")
    data = data_of(shoal(*arguments, "--strategy", "fedavg", "--seed", "5", "--json"))
    fixed = {"scenario", "strategy", "seed", "mean", "worst", "personal_mean", "personal_worst"}
    assert fixed | {"ari", "clusters", "rounds", "history"} <= set(data)
    assert (data["scenario"], data["strategy"], data["seed"], data["rounds"]) == ("table-wine", "fedavg", 5, 2)


def test_an_interrupt_ends_with_130(tmp_path):
    """Ctrl-C in the middle of a run; the --save file keeps the results of earlier algorithms."""
    arguments = ["simulate", "toy", "--algorithm", "all", "--rounds", "60", "--set", "pause_s=0.02"]
    process = subprocess.Popen(
        [sys.executable, "-m", TOY, *arguments, "--save", str(tmp_path / "kept.json")],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "kept.json").exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert [r["algorithm"] for r in json.loads((tmp_path / "kept.json").read_text())["data"]["results"]] == ["ifca"]


def test_progress_is_for_terminals():
    """On one, a bar for each algorithm; only the result is on stdout."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", TOY, "simulate", "toy", "--rounds", "5", "--json"],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    shown = os.read(controller, 65536).decode()
    os.close(controller)
    assert process.returncode == 0
    assert json.loads(out)["data"]["rounds"] == 5
    assert "dealing the samples" in shown
    assert re.search(r"ifca .*5/5", shown)
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["simulate", "--help"], ["data", "--help"], ["data", "fetch", "--help"]]
)
def test_help_loads_nothing_heavy(arguments):
    """It answers without numpy, torch and matplotlib."""
    script = "import atexit, sys\natexit.register(lambda: print('loaded:', *(m for m in HEAVY if m in sys.modules)))\n"
    heavy = "HEAVY = ('numpy', 'torch', 'scipy', 'sklearn', 'matplotlib', 'rich')\n"
    done = python(heavy + script + "from shoal.cli import main\nmain()", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


# -- `--save` and `--html`: refused before the work where nothing can be written, and no reason to lose the figures after it --


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
