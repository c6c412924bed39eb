"""The health of a device: its membership, service, stored state and data. Data against a task: tests/cli/test_doctor.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from edge_client import doctor
from edge_client.config import EdgeConfig
from edge_client.doctor import diagnose
from edge_client.learning.executor import choice
from edge_client.storage.finished_models import FinishedModels, Validation
from edge_client.storage.pending_upload import PENDING_FILES
from edge_client.storage.state import RUN_FILE, DeviceState, OwnModel
from shoal.errors import StorageError
from shoal.util.files import exclusive


@pytest.fixture
def directory(parties):
    return parties.members["dev-1"].directory


def checks(directory, data=None, task="", executor="auto"):
    config = EdgeConfig(directory, data or directory, broker="mqtt://127.0.0.1:1", executor=executor)
    found = diagnose(config, with_data=data is not None, task=task)
    return {c.name: c for c in found}


def follow(monkeypatch, bundle, digest=bytes(32)):
    """Let devices follow run 1, of this task."""
    run = SimpleNamespace(bundle=bundle, plan=SimpleNamespace(run=1, task_digest=digest))
    monkeypatch.setattr(doctor, "_run", lambda *_: run)


def test_fresh_device_lacks_three_things(directory, tmp_path):
    """A fresh device lacks its broker its start and its data; a directory of no device has the checks that need none."""
    found = checks(directory)
    assert {name: c.result for name, c in found.items() if c.result != "ok"} == {
        "broker": "failure",
        "service": "warning",
        "data": "warning",
    }
    assert not [name for name in PENDING_FILES if (directory / name).exists()], "it only reads"
    assert list(checks(tmp_path)) == ["membership", "directory", "disk"]


def test_a_revoked_device_is_told_so(parties, directory):
    parties.owner.revoke("dev-1")
    parties.members["dev-1"].adopt(parties.owner.roster_bytes)
    assert checks(directory)["membership"].result == "failure"


@pytest.mark.slow
def test_service_states_are_told(directory):
    """The service runs is connected or was stopped by its disk."""
    files = DeviceState(directory)
    with exclusive(directory, wait_s=0, hint=""):
        assert checks(directory)["service"].result == "ok"
        files.save_status({"connection": {"connected": False, "broker": "mqtt://reef:1883", "since": "T"}})
        assert checks(directory)["service"].detail == "running, not connected to mqtt://reef:1883 since T"
    files.clear_trouble()
    files.save_trouble(StorageError("the disk is full", hint="free some space"), "T")
    found = checks(directory)["service"]
    assert (found.result, found.detail, found.advice) == (
        "failure",
        "stopped at T: the disk is full",
        "free some space",
    )


def test_running_device_knows_its_clock(directory):
    """A running device has found its clock wrong."""
    files = DeviceState(directory)
    files.save_status({"clock": "at least 2 h behind the aggregator's; set it"})
    assert checks(directory)["clock"].result == "ok", "what a stopped one has found is over"
    with exclusive(directory, wait_s=0, hint=""):
        found = checks(directory)["clock"]
    assert (found.result, found.advice) == ("failure", "set it")
    assert found.detail == "this machine's clock is at least 2 h behind the aggregator's"


@pytest.mark.parametrize("name", [PENDING_FILES[0], RUN_FILE])
def test_damaged_state_is_a_failure(directory, name):
    (directory / name).write_bytes(b"junk")
    (directory / name).chmod(0o600)
    found = checks(directory)["state"]
    assert found.result == "failure"
    assert found.detail


def test_data_are_tried_on_a_named_task(tmp_path, directory, monkeypatch, logistic):
    """One of a file, or that of the run by its name."""
    x = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(20) % 3)
    logistic(4, 3).to_dir(tmp_path / "task")
    for task in (tmp_path / "task", tmp_path / "task" / "task.toml"):
        found = checks(directory, tmp_path / "d.npz", str(task))["data"]
        assert (found.result, found.detail) == ("ok", f"{tmp_path}/d.npz: 20 samples, which fit the task logistic")
    assert "no task file other" in checks(directory, tmp_path / "d.npz", "other")["data"].detail
    follow(monkeypatch, logistic(4, 3))
    assert checks(directory, tmp_path / "d.npz", "logistic")["data"].detail.endswith("the task of run 1")


def test_doubts_about_data_are_a_warning(tmp_path, directory, monkeypatch, logistic):
    """Doubts about the data are a warning with the thing to do."""
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32) * np.array([1, 1, 0, 1e4], np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.ones(9, np.int64))
    follow(monkeypatch, logistic(4, 3))
    found = checks(directory, tmp_path / "d.npz")["data"]
    assert found.result == "warning"
    assert found.detail.endswith("every sample has the label 1: an accuracy of 100 % means nothing here (and 1 more)")
    assert found.advice == "check the labels"


def test_ignorant_model_is_a_warning(tmp_path, directory, monkeypatch, logistic):
    """A finished model that has learned nothing is a warning."""
    bundle = logistic(4, 3)
    x = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=(np.arange(20) == 0).astype(np.int64))
    follow(monkeypatch, bundle, bundle.digest)
    assert checks(directory, tmp_path / "d.npz")["data"].result == "ok"
    own = OwnModel(1, b"r" * 16, 5, 0, np.zeros(bundle.length, np.float32))
    figures = {own.run_id: Validation(0.5, 3, 4, 4)}
    FinishedModels(directory).add(own, [], bundle, algorithm="fedavg", at_s=1, figures=figures)
    found = checks(directory, tmp_path / "d.npz")["data"]
    assert "right in 75.0% of the validation share, and the most common label in " in found.detail
    assert (found.result, found.advice.startswith("look at the data")) == ("warning", True)


def test_the_executor_that_run_would_take(directory, monkeypatch):
    assert checks(directory)["executor"].detail.startswith("ONNX Runtime 1.")
    found = checks(directory, executor="numpy")["executor"]
    words = f"numpy {np.__version__}, for tasks without convolutions; no task yet to try it on"
    assert (found.result, found.detail) == ("ok", words)
    with monkeypatch.context() as patch:
        patch.setattr(doctor.trial, "failure", lambda: "ONNX Runtime ended its process with SIGILL")
        found = checks(directory)["executor"]
    assert (found.result, found.detail) == ("failure", "ONNX Runtime ended its process with SIGILL")
    assert "executor = numpy" in found.advice
    monkeypatch.setattr(choice, "_is_installed", lambda _package: False)
    assert checks(directory)["executor"].detail.startswith("numpy ")
    assert checks(directory, executor="onnxruntime")["executor"].result == "failure"
