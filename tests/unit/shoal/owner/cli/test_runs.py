"""`shoal-fleet run`: for each command its lines, its JSON and one mistake, against a fleet on the loopback broker."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shoal.errors import BrokerUnreachableError, ShoalError
from shoal.owner.cli.main import app
from shoal.owner.keys.vault import run_file
from shoal.version import WIRE
from tests.helpers.fleets import make_exact_fleet

pytestmark = pytest.mark.slow
WITHIN_S = 200.0


@pytest.fixture
def fleet(tmp_path, answering):
    with make_exact_fleet(tmp_path / "fleet", rounds=4) as made:
        yield answering(made)


@pytest.fixture
def call(fleet):
    """Call ``run VERB DIR ...``; returns its output, and the error that ended it, if one did."""

    def invoke(verb, *arguments, status=0):
        words = ["run", verb, str(fleet.stage.fleet.path), *map(str, arguments)]
        done = CliRunner().invoke(app, words)
        error = done.exception if isinstance(done.exception, ShoalError) else None
        assert (done.exit_code if error is None else error.exit_code) == status, (done.output, done.exception)
        return SimpleNamespace(out=done.stdout, err=done.stderr, error=error)

    return invoke


def data(told):
    return json.loads(told.out)["data"]


def test_pause_resume_and_stop_print_the_run(fleet, call):
    """A stopped run is not ready to be resumed."""
    fleet.run_until(lambda: fleet.closed() == 1, WITHIN_S)
    assert call("pause", 1).out.startswith(
        "run 1: fedavg, round open, paused by the owner, round 2 of 4, last round closed 20"
    )
    assert data(call("pause", 1, "--json"))["order"] == "paused by the owner"
    assert call("resume", 1).out.startswith("run 1: fedavg, round open, round 2 of 4")
    stopped = data(call("stop", 1, "--json"))
    assert (stopped["run"], stopped["order"], stopped["run_id"]) == (1, "stopped by the owner", fleet.plan.run_id.hex())
    assert "hint" not in str(call("resume", 1, status=11).error)
    fleet.run(WITHIN_S)
    assert call("stop", 1, "--now").out.startswith("run 1: fedavg, finished, stopped by the owner, round 2 of 4")


@pytest.mark.parametrize("verb", ["pause", "resume", "stop", "logs", "show"])
def test_absent_run_is_a_usage_error(call, verb):
    """A run that is not there is a mistake of usage."""
    error = call(verb, 9, status=2).error
    assert "run 9" in str(error)
    assert "shoal-fleet run list" in error.hint


def test_list_prints_each_run(fleet, call):
    assert call("list").out == "run 1: fedavg, round open, round 1 of 4\n"
    fleet.run(WITHIN_S)
    (run,) = data(call("list", "--json"))["runs"]
    assert (run["phase"], run["round"], run["rounds"]) == ("finished", 4, 4)
    assert run["round_at"].endswith("Z")
    (fleet.stage.aggregator_dir / "runs" / "000001.run").unlink()
    told = call("list")
    assert (told.out, told.err) == ("", "the aggregator has no run yet\n")


def test_show_prints_the_plan_and_the_run(fleet, call):
    plan, run = call("show", 1).out.splitlines()
    assert plan.startswith("run 1: fedavg, mask permutation, 4 rounds")
    assert run == "run 1: fedavg, round open, round 1 of 4"
    shown = data(call("show", 1, "--json"))
    assert (shown["plan"]["rounds"], shown["aggregator"]["phase"]) == (4, "round")
    (fleet.stage.aggregator_dir / "runs" / "000001.run").unlink()
    assert call("show", 1).out.splitlines()[1] == "run 1: not at the aggregator yet"


def test_logs_prints_the_last_rounds(fleet, call):
    assert call("logs", 1).err == "run 1 has closed no round yet\n"
    fleet.run(WITHIN_S)
    lines = call("logs", 1, "--last", "2").out.splitlines()
    assert [line.split(" ", 1)[1].partition(":")[0] for line in lines] == ["round 4", "final round 5"]
    records = data(call("logs", 1, "--json"))["records"]
    assert [r["round"] for r in records] == [1, 2, 3, 4, 5]
    call("logs", 1, "--last", "0", status=2)


def test_start_sends_a_run_that_is_signed(fleet, call, monkeypatch):
    """One that can't be sent is stored."""
    (fleet.stage.aggregator_dir / "runs" / "000001.run").unlink()
    sent = data(call("start", "--run", 1, "--json"))
    assert (sent["run"], sent["sent"]) == (1, True)
    assert (fleet.stage.aggregator_dir / "runs" / "000001.run").exists()
    assert call("start", "--run", 1).out.startswith("run 1: fedavg, ")

    def ask(*_arguments, **_parts):
        raise BrokerUnreachableError("no broker", hint="start it")

    monkeypatch.setattr("shoal.owner.console.asking.ask", ask)
    error = call("start", "--run", 1, status=5).error
    assert error.hint.startswith("start it; run 1 is signed and stored: shoal-fleet run start ")


def test_start_names_unable_devices(fleet, call, monkeypatch):
    """Start names the devices that can't follow the run."""
    monkeypatch.setattr("aggregator.run_control.RunControl._left_out", lambda *_: ("dev-9 (shoal 9.0.0, wire 3)",))
    told = call("start", "--run", 1)
    assert f"warning: run 1 is in wire version {WIRE}, which dev-9 (shoal 9.0.0, wire 3) can't follow\n" in told.err
    assert "install the same version of Shoal there as here" in told.err
    assert data(call("start", "--run", 1, "--json"))["left_out"] == ["dev-9 (shoal 9.0.0, wire 3)"]


def test_start_writes_file_to_carry_with_out(fleet, call, tmp_path):
    told = call("start", "--run", 1, "--out", tmp_path / "carried.run")
    assert told.out == f"{tmp_path / 'carried.run'}\n"
    assert "put this file into the aggregator's runs directory" in told.err
    assert (tmp_path / "carried.run").read_bytes() == run_file(fleet.stage.fleet.path, 1).read_bytes()
    assert data(call("start", "--run", 1, "--out", tmp_path / "carried.run", "--json"))["sent"] is False


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--run", "1", "--algorithm", "cfl"), 2, "--run sends a run that is signed already"),
        ((), 2, "--task is missing"),
        (("--run", "7"), 2, "there is no signed run 7"),
        (("--run", "1", "--weight-cap", "0.5"), 2, "weight_cap is a number of at least 1, or 0"),
    ],
)
def test_options_of_start_that_do_not_fit(call, arguments, status, words):
    assert words in str(call("start", *arguments, status=status).error)
