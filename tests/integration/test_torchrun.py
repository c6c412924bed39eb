"""`shoal simulate` under torchrun: the result of one process, one JSON object, and no rank that waits for a dead one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from shoal_lab.experiments.common.experiment import Options, Quiet

from tests.helpers import waiting
from tests.helpers.trees import ROOT
from tests.integration.ranks_study import SETTINGS, STUDY, data_of, ended, environment, start_ranks

pytestmark = [pytest.mark.torch, pytest.mark.process]
LOST = 11
"""Exit status of a rank that has lost another."""
FLEETS = {
    "a fleet's defaults": {},
    "sums of uneven devices": {"paper": "on"},
    "sums of equal devices": {"paper": "on", "even": "on"},
    "some devices, and Gram matrices by coordinates": {"cohort": "0.6", "columns": "1"},
}


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")


def torchrun(*arguments, world=2, timeout_s=120.0):
    """Run an experiment under torchrun itself."""
    command = [*TORCHRUN, str(world), *arguments]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.parametrize(
    "settings",
    [pytest.param(v, id=k, marks=[pytest.mark.long] if "Gram" not in k else []) for k, v in FLEETS.items()],
)
def test_two_ranks_give_one_result(tmp_path, settings):
    """The models of each strategy after six rounds to 1e-6, all clusters, and the accuracy; only rank 0 writes them."""
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    saves = {rank: ("--save", str(tmp_path / f"rank-{rank}.json")) for rank in (0, 1)}
    arguments = ("--algorithm", "all", "--rounds", "6", "--mask", "permutation", "--json", *words)
    done = ended(start_ranks(tmp_path, *arguments, each=saves))
    assert [status for status, _, _ in done] == [0, 0], done[1][2]
    assert done[1][1] == "", "rank 1 prints nothing"
    results = data_of(done[0][1])["results"]
    assert [path.name for path in tmp_path.glob("*.json")] == ["rank-0.json"]
    assert json.loads((tmp_path / "rank-0.json").read_text())["data"]["results"] == results
    assert [result["algorithm"] for result in results] == list(SETTINGS)
    for found in results:
        alone = STUDY.run(
            Options(algorithm=found["algorithm"], rounds=6, mask="permutation", settings=settings), Quiet()
        )
        assert found.pop("world") == 2
        assert found.keys() == alone.keys()
        for name, theta in alone["models"].items():
            np.testing.assert_allclose(found["models"][name], theta, rtol=0, atol=1e-6)
        for name in ("cluster_of", "taken", "clusters", "rounds"):
            assert found[name] == alone[name]
        assert found["accuracy"] == pytest.approx(alone["accuracy"], abs=0.05)
        for mine, expected in zip(found["history"], alone["history"], strict=True):
            assert mine["loss"] == pytest.approx(expected["loss"], abs=2e-4)
            assert mine["purity"] == expected["purity"]


@pytest.mark.long
def test_surplus_ranks_are_idle(tmp_path):
    """More ranks than devices of a round leave some idle."""
    done = ended(start_ranks(tmp_path, "--set", "cohort=0.2", "--json", world=4))
    assert [status for status, _, _ in done] == [0] * 4, done[0][2]
    assert data_of(done[0][1])["world"] == 4


@pytest.mark.long
def test_torchrun_prints_one_object():
    """And one rank of torchrun says so too."""
    arguments = ("-m", "shoal", "simulate", "cfl-toys", "--rounds", "2", "--json")
    two, one = torchrun(*arguments), torchrun(*arguments, world=1)
    assert (two.returncode, one.returncode) == (0, 0), two.stderr
    assert (data_of(two.stdout)["world"], data_of(one.stdout)["world"]) == (2, 1)
    assert data_of(two.stdout)["accuracy"] == data_of(one.stdout)["accuracy"]


def until(rank, line):
    """Wait for a line in a rank's standard error."""
    waiting.until(lambda: rank.poll() is not None or line in rank.errors.read_text().splitlines(), f"{line!r}")
    assert rank.poll() is None, f"it ended without {line!r}"


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), 1])
def test_killed_rank_ends_the_other(tmp_path, killed):
    """A rank that is killed ends the other with an error."""
    processes = start_ranks(tmp_path, "--rounds", "100000", "--json")
    other = processes[1 - killed]
    until(processes[killed], f"rank {killed} closed 3")
    processes[killed].kill()
    status, out, errors = ended([other], timeout_s=30.0)[0]
    ended(processes)
    assert status == LOST
    assert "error: another rank has ended, or can't be reached" in errors
    assert "hint: its own messages say why" in errors
    assert "Traceback" not in errors
    if other is processes[0]:
        assert json.loads(out)["error"]["type"] == "LostRankError"
    else:
        assert out == ""
        assert "rank 1:" in errors


def test_stalled_rank_ends_the_other(tmp_path):
    """A rank that stands still ends the other in time."""
    processes = start_ranks(tmp_path, "--rounds", "100000", wait_s=2.0)
    until(processes[1], "rank 1 closed 3")
    processes[1].send_signal(signal.SIGSTOP)
    try:
        status, _, errors = ended(processes[:1], timeout_s=30.0)[0]
    finally:
        ended(processes[:1])
        processes[1].kill()
        processes[1].wait()
    assert status == LOST
    assert "error: another rank has ended, or can't be reached" in errors


@pytest.mark.long
def test_torchrun_ends_with_a_process():
    """Torchrun ends soon after one of its processes."""
    command = [
        *TORCHRUN,
        "2",
        "-m",
        "tests.integration.ranks_study",
        "simulate",
        "tiny",
        "--rounds",
        "100000",
        "--json",
    ]
    agent = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert any(line == "rank 1 closed 3\n" for line in agent.stderr)
    children = psutil.Process(agent.pid).children()
    (killed,) = (child for child in children if child.environ().get("RANK") == "1")
    killed.kill()
    try:
        out, errors = agent.communicate(timeout=45.0)
    finally:
        agent.kill()
    assert agent.returncode == 1
    assert "rank      : 1" in errors
    assert len(out.splitlines()) <= 1
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("name", ["--seed", pytest.param("--rounds", marks=pytest.mark.long)])
def test_unlike_options_of_ranks_are_refused(tmp_path, name):
    """Ranks with other options are refused."""
    done = ended(start_ranks(tmp_path, "--json", each={1: (name, "7")}))
    assert [status for status, _, _ in done] == [7, 7]
    error = json.loads(done[0][1])["error"]
    assert (error["type"], error["message"]) == (
        "IntegrityError",
        "rank 1 and rank 0 differ in options, origins or data",
    )


@pytest.mark.long
def test_missing_rank_ends_the_others(tmp_path):
    """A rank that never comes ends the others in time."""
    processes = start_ranks(tmp_path, "--rounds", "2", wait_s=3.0)
    processes[1].kill()
    status, _, errors = ended(processes[:1], timeout_s=60.0)[0]
    ended(processes)
    assert status == LOST
    assert "error: another rank has ended, or can't be reached" in errors


@pytest.mark.long
def test_checkpoint_fits_other_ranks(tmp_path, monkeypatch):
    """A stopped run goes on with its checkpoint on another number of ranks."""
    from shoal.simulation.engine import checkpoint

    monkeypatch.setattr(checkpoint, "SAVE_EVERY_S", 0.0)
    path = tmp_path / "run.npz"
    whole = STUDY.run(Options(algorithm="ifca", rounds=6, mask="permutation"), Quiet())

    class Interrupts(Quiet):
        def round(self, _algorithm, done, _total, _record):
            if done == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        STUDY.run(Options(algorithm="ifca", rounds=6, mask="permutation", checkpoint=path), Interrupts())
    assert path.exists()
    arguments = ("--algorithm", "ifca", "--rounds", "6", "--mask", "permutation", "--checkpoint", str(path), "--json")
    done = ended(start_ranks(tmp_path, *arguments))
    assert [status for status, _, _ in done] == [0, 0], done[1][2]
    found = data_of(done[0][1])
    for name, theta in whole["models"].items():
        np.testing.assert_allclose(found["models"][name], theta, rtol=0, atol=1e-6)
    assert "closed 2" not in done[0][2]
