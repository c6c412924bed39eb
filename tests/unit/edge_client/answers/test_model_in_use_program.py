"""The operator's program for new models: what it is given, when it runs, and how it can fail without harm."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from edge_client.answers import model_in_use
from edge_client.answers.model_in_use import LONGEST_S, ModelInUse
from edge_client.storage.finished_models import FinishedModels
from edge_client.storage.state import ON_MODEL_FILE, load_json
from shoal.errors import StorageError
from tests.helpers.models_in_use import finish

ASLEEP_S = 30


@pytest.fixture
def device(tmp_path):
    """A device with one finished model, and a program that notes its arguments and environment and does what a file says."""
    finish(tmp_path / "device", 1)
    program, notes = tmp_path / "program", tmp_path / "notes"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {notes}\nenv > {tmp_path}/environment\nwhile test -e {tmp_path}/held; do sleep .01; done\n'
        f"test ! -e {tmp_path}/bad || exit 3\n"
    )
    program.chmod(0o755)
    return SimpleNamespace(directory=tmp_path / "device", program=program, notes=notes, root=tmp_path)


def runs(device):
    """Return the run of each call of the program so far."""
    return [int(line.split()[-1]) for line in device.notes.read_text().splitlines()] if device.notes.exists() else []


def settle(models, now_s=0.0):
    """Look after the program until none runs."""
    end_s = time.monotonic() + ASLEEP_S
    while models.keep_up(now_s):
        assert time.monotonic() < end_s
        time.sleep(0.005)


def current(device):
    """Return the digest of the model in use; None before the first."""
    return (load_json(device.directory / "model.json") or {}).get("sha256")


def failure(device):
    return (load_json(device.directory / ON_MODEL_FILE) or {}).get("error", "")


def test_program_gets_paths_and_run(device):
    models = ModelInUse(device.directory, device.program)
    settle(models)
    folder = device.directory
    assert device.notes.read_text() == f"{folder}/model.onnx {folder}/model.json 1\n"
    assert json.loads((folder / "model.json").read_text())["run"] == 1
    settle(models)
    assert runs(device) == [1]
    assert load_json(folder / ON_MODEL_FILE)["model"] == current(device)


def test_environment_has_no_secrets(device, monkeypatch):
    monkeypatch.setenv("SHOAL_EDGE_BROKER", "mqtts://me:hush@broker")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/x")
    settle(ModelInUse(device.directory, device.program))
    found = (device.root / "environment").read_text()
    assert "hush" not in found
    assert "CREDENTIALS_DIRECTORY" not in found
    assert f"PATH={os.environ['PATH']}" in found


def test_models_are_published_without_one(device):
    models = ModelInUse(device.directory, None)
    assert not models.keep_up(0.0)
    before = current(device)
    finish(device.directory, 2)
    assert not models.keep_up(0.0)
    assert current(device) not in (None, before)
    assert not (device.directory / ON_MODEL_FILE).exists()


def test_newest_wins_and_one_runs_at_a_time(device):
    """Of the models that come while the program runs, it runs for the last alone."""
    (device.root / "held").touch()
    models = ModelInUse(device.directory, device.program)
    assert models.keep_up(0.0)
    for run in (2, 3, 4):
        finish(device.directory, run)
        assert models.keep_up(0.0)
    (device.root / "held").unlink()
    settle(models)
    assert runs(device) == [1, 4]


def test_start_runs_it_for_a_newer_model(device):
    """At a start it runs if the model has changed since its last good end, and else not."""
    settle(ModelInUse(device.directory, device.program))
    settle(ModelInUse(device.directory, device.program))
    assert runs(device) == [1]
    finish(device.directory, 2)
    settle(ModelInUse(device.directory, device.program))
    FinishedModels(device.directory).rollback(1)
    settle(ModelInUse(device.directory, device.program))
    assert runs(device) == [1, 2, 1]


def test_failure_is_told_and_tried_again(device):
    """A failure is in the status file, and is tried again at the next start or for the next model, and not before."""
    (device.root / "bad").touch()
    models = ModelInUse(device.directory, device.program)
    settle(models)
    settle(models)
    assert runs(device) == [1]
    assert failure(device) == f"{device.program} ended with status 3"
    (device.root / "bad").unlink()
    settle(ModelInUse(device.directory, device.program))
    assert (runs(device), failure(device)) == ([1, 1], "")


def test_missing_program_harms_nobody(device):
    models = ModelInUse(device.directory, device.root / "none")
    settle(models)
    assert failure(device) == f"{device.root / 'none'} can't be started: No such file or directory"
    finish(device.directory, 2)
    settle(models)
    assert json.loads((device.directory / "model.json").read_text())["run"] == 2


def test_hanging_program_is_ended(device):
    (device.root / "held").touch()
    models = ModelInUse(device.directory, device.program)
    assert models.keep_up(0.0)
    process = models._process
    assert models.keep_up(LONGEST_S - 1)
    assert not models.keep_up(LONGEST_S)
    assert process.returncode == -9
    assert "has not ended for 300 seconds" in failure(device)


def test_stopping_ends_it_for_a_new_start(device):
    (device.root / "held").touch()
    models = ModelInUse(device.directory, device.program)
    assert models.keep_up(0.0)
    process = models._process
    models.close()
    models.close()
    assert process.returncode == -9
    (device.root / "held").unlink()
    settle(ModelInUse(device.directory, device.program))
    assert load_json(device.directory / ON_MODEL_FILE)["run"] == "1"


@pytest.mark.parametrize("junk", [b"", b"[]", b"\xff", b'{"model": 5}'])
def test_damaged_note_runs_it_again(device, junk):
    (device.directory / ON_MODEL_FILE).write_bytes(junk)
    settle(ModelInUse(device.directory, device.program))
    assert runs(device) == [1]


def test_damaged_models_are_logged(device, caplog):
    """What `predict` would refuse is a warning here, and no end of the device."""
    for file in (device.directory / "finished").glob("model-*.bin"):
        file.write_bytes(b"x")
    models = ModelInUse(device.directory, device.program)
    settle(models)
    assert "the model in use can't be replaced" in caplog.text
    assert runs(device) == []


def test_a_change_in_the_same_tick_is_seen(device, monkeypatch):
    """A change right after a look leaves the folder's time as it was, and the next look finds it."""
    monkeypatch.setattr(model_in_use, "TICK_NS", 10**12)
    models = ModelInUse(device.directory, device.program)
    settle(models)
    folder = device.directory / "finished"
    before = folder.stat().st_mtime_ns
    finish(device.directory, 2)
    os.utime(folder, ns=(before, before))
    settle(models)
    assert runs(device) == [1, 2]


def test_settled_models_are_not_read_again(device, monkeypatch):
    models = ModelInUse(device.directory, None)
    os.utime(device.directory / "finished", ns=(1, 1))
    models.keep_up(0.0)
    monkeypatch.setattr(model_in_use, "publish", lambda _: pytest.fail("it was read again"))
    models.keep_up(1.0)


def test_full_disk_leaves_the_model_before(device, monkeypatch, caplog):
    """The device itself stops at its own next write."""

    def full(_directory):
        raise StorageError("can't write: No space left on device")

    models = ModelInUse(device.directory, device.program)
    settle(models)
    monkeypatch.setattr(model_in_use, "publish", full)
    finish(device.directory, 2)
    settle(models)
    assert "the model in use can't be replaced" in caplog.text
    assert runs(device) == [1]


def test_nothing_finished_runs_nothing(device, tmp_path):
    (tmp_path / "new").mkdir()
    settle(ModelInUse(tmp_path / "new", device.program))
    assert runs(device) == []
