"""The files of the model in use, every point at which their writer can be killed, and the operator's program for new models."""

import json
import os
import stat
import time
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

from edge_client.answers import model_in_use
from edge_client.answers.inference import choose
from edge_client.answers.model_in_use import LONGEST_S, ModelInUse, publish
from edge_client.run.finishing import back_to_cluster
from edge_client.storage.finished_models import CandidateFit, FinishedModels, PersonalChoice
from edge_client.storage.state import ON_MODEL_FILE, load_json
from shoal.digests import sha256
from shoal.errors import ConfigError, IntegrityError, TaskError
from shoal.util.files import exclusive
from tests.helpers import own_trainers
from tests.helpers.models_in_use import NAMED, finish, theta_of
from tests.helpers.parties import Parties
from tests.helpers.power_cuts import cut_at


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "device"


def put_in_use(directory, run, *theta, **options):
    """Finish a run and put its model in use."""
    finish(directory, run, *theta, **options)
    publish(directory)


def current(directory):
    """Return the folder of the version in use; None before the first."""
    link = directory / "in-use" / "current"
    return link.resolve() if link.is_symlink() else None


def pair(directory):
    """Return what a reader finds: model.json, after a check that it belongs to the model beside it."""
    folder = (directory / "in-use" / "current").resolve()
    document = json.loads((folder / "model.json").read_bytes())
    model = (folder / document["file"]).read_bytes()
    assert sha256(model).hex() == document["sha256"]
    if document["file"] == "model.onnx":
        facts = {p.key: p.value for p in onnx.load_from_string(model).metadata_props}
        assert facts["run"] == str(document["run"])
    return document


def run_of(directory):
    """Return the run of the model in use; None before the first."""
    return pair(directory)["run"] if current(directory) else None


def test_files_say_what_they_hold(directory):
    """The model is ONNX with probabilities as an output, and is not written again while it is the same."""
    put_in_use(directory, 1)
    document = json.loads((directory / "model.json").read_bytes())
    assert document == pair(directory)
    told = {"run": 1, "round": 9, "cluster": 0, "choice": "cluster", "task": "logistic", "kind": "classification"}
    assert told.items() <= document.items()
    assert (document["features"], document["labels"]) == (list(NAMED.features), list(NAMED.labels))
    assert document["validation_accuracy"] == 0.001
    found = onnx.load(directory / "model.onnx")
    onnx.checker.check_model(found, full_check=True)
    facts = {p.key: p.value for p in found.metadata_props}
    assert facts["features"].split("\n") == list(NAMED.features)
    assert facts["labels"].split("\n") == list(NAMED.labels)
    session = onnxruntime.InferenceSession((directory / "model.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    assert [o.name for o in session.get_outputs()] == ["outputs", "probabilities"]
    outputs, probabilities = session.run(None, {"x": np.zeros((2, 4), np.float32)})
    np.testing.assert_allclose(probabilities, np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True), rtol=1e-6)
    before = (directory / "model.onnx").stat()
    publish(directory)
    assert (directory / "model.onnx").stat() == before


def test_others_may_read_what_they_reach(directory):
    """Whatever the umask: the files have a mode of their own, and the device's directory stays closed."""
    before = os.umask(0o077)
    try:
        put_in_use(directory, 1)
    finally:
        os.umask(before)
    folder = directory / "in-use"
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "current", *(folder / "current").iterdir())]
    assert modes == [0o755, 0o755, 0o644, 0o644]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in (directory / "finished").iterdir()} == {0o600}


def test_rollback_goes_back_here_too(directory):
    for run in (1, 2):
        put_in_use(directory, run)
    first = current(directory)
    FinishedModels(directory).rollback(1)
    publish(directory)
    assert run_of(directory) == 1
    FinishedModels(directory).rollback(2)
    publish(directory)
    assert current(directory) == first


def test_open_files_and_version_before_stay(directory):
    put_in_use(directory, 1)
    folder = (directory / "in-use" / "current").resolve()
    with (directory / "model.onnx").open("rb") as file:
        head = file.read(10)
        for run in (2, 3):
            assert (folder / "model.json").exists()
            put_in_use(directory, run)
        assert (head + file.read()).endswith(theta_of(1).tobytes())
    assert not folder.exists()
    assert len([p for p in (directory / "in-use").iterdir() if p.is_dir() and not p.is_symlink()]) == 2


def choose_own(directory, run, theta):
    """Let the device's personal choice be a model that it trained."""
    choice = PersonalChoice(
        version=1,
        run_id=run.to_bytes(16),
        choice="3",
        by_hand=False,
        fits=(CandidateFit("cluster", 0.5), CandidateFit("3", 0.25)),
        samples=40,
        folds=0,
        took_s=1.0,
        made_at_s=1,
        length=len(theta),
    )
    FinishedModels(directory).save_personal(choice, theta)


def test_personal_choice_is_in_use(tmp_path):
    """The file is the model that `predict` takes, with the figures of its own fit."""
    directory = Parties(tmp_path, "dev-1").members["dev-1"].directory
    finish(directory, 1)
    choose_own(directory, 1, theta_of(5))
    publish(directory)
    document = pair(directory)
    names = ("choice", "validation_loss", "validation_accuracy", "validation_samples")
    assert [document[name] for name in names] == ["3", 0.25, None, 40]
    assert (directory / "model.onnx").read_bytes().endswith(choose(directory).at(None).theta.tobytes())
    back_to_cluster(FinishedModels(directory))
    publish(directory)
    assert pair(directory)["validation_accuracy"] == 0.001
    assert (directory / "model.onnx").read_bytes().endswith(theta_of(1).tobytes())


def test_own_training_code_has_a_layout(directory):
    """A task with a trainer of its own has its parameters and their layout."""
    task = own_trainers.bundle()
    theta = np.arange(task.length, dtype=np.float32)
    put_in_use(directory, 1, theta, task=task)
    document = pair(directory)
    body = (directory / "in-use" / "current" / document["file"]).read_bytes()
    assert document["file"] == "model.bin"
    sizes = [int(np.prod(p["shape"])) for p in document["parameters"]]
    assert (sum(sizes), np.frombuffer(body, "<f4").tolist()) == (task.length, theta.tolist())
    assert not (directory / "model.onnx").exists()


def test_damaged_models_leave_the_one_before(directory):
    put_in_use(directory, 1)
    finish(directory, 2, np.full(15, np.nan, np.float32))
    with pytest.raises(TaskError, match="not finite"):
        publish(directory)
    finish(directory, 3)
    for file in (directory / "finished").glob("model-*.bin"):
        file.write_bytes(b"x")
    with pytest.raises(IntegrityError):
        publish(directory)
    assert run_of(directory) == 1


def test_system_errors_are_ours(directory, monkeypatch):
    """Also of two writers at a time."""
    monkeypatch.setattr("edge_client.answers.model_in_use.WAIT_S", 0.0)
    put_in_use(directory, 1)
    with exclusive(directory / "in-use", wait_s=0, hint=""), pytest.raises(ConfigError, match="in use by another"):
        publish(directory)
    finish(directory, 2)
    (directory / "model.json").unlink()
    (directory / "model.json").mkdir()
    (directory / "model.json" / "x").touch()
    with pytest.raises(ConfigError, match="can't write"):
        publish(directory)


def test_killed_at_any_change_of_the_disk(tmp_path):
    """The old pair or the new one, never a mixture; the next start puts the new one in place, and the next model cleans up."""
    outcomes, cuts, ended = set(), 0, False
    while not ended:
        directory, first = tmp_path / str(cuts), tmp_path / f"first-{cuts}"
        for run in (1, 2):
            put_in_use(directory, run)
        finish(directory, 3)
        finish(first, 1)
        ended = cut_at(cuts, publish, directory)
        ended = cut_at(cuts, publish, first) and ended
        outcomes.add((run_of(directory), run_of(first)))
        publish(directory)
        assert run_of(directory) == json.loads((directory / "model.json").read_bytes())["run"] == 3
        publish(first)
        assert {p.name for p in first.iterdir()} == {"finished", "in-use", "model.onnx", "model.json"}
        assert run_of(first) == 1
        put_in_use(directory, 4)
        left = {p.name for p in (directory / "in-use").iterdir()} - {".lock", "current", ".current.link"}
        assert len(left) <= 2
        cuts += 1
    assert {run for run, _ in outcomes} == {2, 3}
    assert {run for _, run in outcomes} == {None, 1}
    assert cuts > 9


# -- The operator's program for new models: what it is given, when it runs, and how it can fail without harm --


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


def settled(device):
    """Start a device and return its model in use, after the program has run for it."""
    models = ModelInUse(device.directory, device.program)
    settle(models)
    return models


def held(device):
    """Return the model in use of a device whose program runs and does not end."""
    (device.root / "held").touch()
    models = ModelInUse(device.directory, device.program)
    assert models.keep_up(0.0)
    return models


def now_in_use(device):
    """Return the digest of the model in use; None before the first."""
    return (load_json(device.directory / "model.json") or {}).get("sha256")


def failure(device):
    return (load_json(device.directory / ON_MODEL_FILE) or {}).get("error", "")


def test_program_gets_paths_and_run(device, monkeypatch):
    """And an environment without secrets."""
    monkeypatch.setenv("SHOAL_EDGE_BROKER", "mqtts://me:hush@broker")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/x")
    models = settled(device)
    folder = device.directory
    assert device.notes.read_text() == f"{folder}/model.onnx {folder}/model.json 1\n"
    assert json.loads((folder / "model.json").read_text())["run"] == 1
    settle(models)
    assert runs(device) == [1]
    assert load_json(folder / ON_MODEL_FILE)["model"] == now_in_use(device)
    found = (device.root / "environment").read_text()
    assert "hush" not in found
    assert "CREDENTIALS_DIRECTORY" not in found
    assert f"PATH={os.environ['PATH']}" in found


def test_models_are_published_without_one(device, monkeypatch):
    """And not read again while they are settled."""
    models = ModelInUse(device.directory, None)
    assert not models.keep_up(0.0)
    before = now_in_use(device)
    finish(device.directory, 2)
    assert not models.keep_up(0.0)
    assert now_in_use(device) not in (None, before)
    assert not (device.directory / ON_MODEL_FILE).exists()
    os.utime(device.directory / "finished", ns=(1, 1))
    models.keep_up(0.0)
    monkeypatch.setattr(model_in_use, "publish", lambda _: pytest.fail("it was read again"))
    models.keep_up(1.0)


def test_newest_wins_and_one_runs_at_a_time(device):
    """Of the models that come while the program runs, it runs for the last alone."""
    models = held(device)
    for run in (2, 3, 4):
        finish(device.directory, run)
        assert models.keep_up(0.0)
    (device.root / "held").unlink()
    settle(models)
    assert runs(device) == [1, 4]


def test_start_runs_it_for_a_newer_model(device):
    """At a start it runs if the model has changed since its last good end, and else not."""
    settled(device)
    settled(device)
    assert runs(device) == [1]
    finish(device.directory, 2)
    settled(device)
    FinishedModels(device.directory).rollback(1)
    settled(device)
    assert runs(device) == [1, 2, 1]


def test_failure_is_told_and_tried_again(device):
    """A failure is in the status file, and is tried again at the next start or for the next model, and not before."""
    (device.root / "bad").touch()
    models = settled(device)
    settle(models)
    assert runs(device) == [1]
    assert failure(device) == f"{device.program} ended with status 3"
    (device.root / "bad").unlink()
    settled(device)
    assert (runs(device), failure(device)) == ([1, 1], "")


def test_missing_program_harms_nobody(device):
    models = ModelInUse(device.directory, device.root / "none")
    settle(models)
    assert failure(device) == f"{device.root / 'none'} can't be started: No such file or directory"
    finish(device.directory, 2)
    settle(models)
    assert json.loads((device.directory / "model.json").read_text())["run"] == 2


def test_hanging_program_is_ended(device):
    models = held(device)
    process = models._process
    assert models.keep_up(LONGEST_S - 1)
    assert not models.keep_up(LONGEST_S)
    assert process.returncode == -9
    assert "has not ended for 300 seconds" in failure(device)


def test_stopping_ends_it_for_a_new_start(device):
    models = held(device)
    process = models._process
    models.close()
    models.close()
    assert process.returncode == -9
    (device.root / "held").unlink()
    settled(device)
    assert load_json(device.directory / ON_MODEL_FILE)["run"] == "1"


@pytest.mark.parametrize("junk", [b"", b"[]", b"\xff", b'{"model": 5}'])
def test_damaged_note_runs_it_again(device, junk):
    (device.directory / ON_MODEL_FILE).write_bytes(junk)
    settled(device)
    assert runs(device) == [1]


def test_damaged_models_are_logged(device, caplog):
    """What `predict` would refuse is a warning here, and no end of the device."""
    for file in (device.directory / "finished").glob("model-*.bin"):
        file.write_bytes(b"x")
    settled(device)
    assert "the model in use can't be replaced" in caplog.text
    assert runs(device) == []


def test_a_change_in_the_same_tick_is_seen(device, monkeypatch):
    """A change right after a look leaves the folder's time as it was, and the next look finds it."""
    monkeypatch.setattr(model_in_use, "TICK_NS", 10**12)
    models = settled(device)
    folder = device.directory / "finished"
    before = folder.stat().st_mtime_ns
    finish(device.directory, 2)
    os.utime(folder, ns=(before, before))
    settle(models)
    assert runs(device) == [1, 2]


def test_nothing_finished_runs_nothing(device, tmp_path):
    (tmp_path / "new").mkdir(mode=0o700)
    settle(ModelInUse(tmp_path / "new", device.program))
    assert runs(device) == []
    assert current(tmp_path / "new") is None
    assert not (tmp_path / "new" / "model.onnx").exists()
