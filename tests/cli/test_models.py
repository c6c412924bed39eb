"""`shoal-edge models` and `rollback`, with the commands that answer: output and exit statuses."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.storage.finished_models import FinishedModels, Validation
from edge_client.storage.state import OwnModel
from shoal.util.locks import exclusive
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle()


def theta(run):
    """Return a model that answers every sample with class ``run % 3``."""
    values = np.zeros(BUNDLE.length, np.float32)
    values[-3 + run % 3] = 1.0
    return values


@pytest.fixture
def finished(call, fleet):
    """Three finished runs, of which the second fits the validation share best."""
    store = FinishedModels(call.home / "dev-1")
    for run, correct in ((1, 10), (2, 18), (3, 12)):
        own = OwnModel(run, bytes([run]) * 16, 5, 0, theta(run))
        figures = {own.run_id: Validation(0.5, correct, 20, 20)}
        store.add(own, [], BUNDLE, algorithm="fedavg", at_s=1_800_000_000 + run, figures=figures)
    np.savez(call.home / "d.npz", x=np.zeros((4, 4), np.float32))
    return store


def predicted(call, *options):
    return call("shoal-edge", "predict", "dev-1", "--data", "d.npz", "--json", *options).data


def test_models_lists_them_newest_first(call, finished):
    lines = call("shoal-edge", "models", "dev-1").out.splitlines()
    assert lines == [
        f"run {run}, round 5; finished 2027-01-15T08:00:0{run}Z; fedavg, cluster 0; validation accuracy {accuracy}, loss 0.5, "
        f"20 samples{end}"
        for run, accuracy, end in ((3, 0.6, ""), (2, 0.9, "; answers"), (1, 0.5, ""))
    ]
    listed = call("shoal-edge", "models", "dev-1", "--json").data["models"]
    assert listed[1] == {
        "run": 2,
        "run_id": "02" * 16,
        "round": 5,
        "algorithm": "fedavg",
        "cluster": 0,
        "task_digest": BUNDLE.digest.hex(),
        "finished_at": "2027-01-15T08:00:02Z",
        "validation_loss": 0.5,
        "validation_accuracy": 0.9,
        "validation_samples": 20,
        "answers": True,
        "pinned": False,
    }


def test_a_device_without_finished_models_lists_none(call, fleet):
    told = call("shoal-edge", "models", "dev-1")
    assert (told.out, told.err) == ("", "no run has finished on this device yet\n")
    assert call("shoal-edge", "models", "dev-1", "--json").data == {"models": []}


def test_rollback_changes_the_answers_at_once_beside_a_running_device(call, finished):
    """The device's directory is locked, as by `shoal-edge run`."""
    with exclusive(call.home / "dev-1", wait_s=0, hint="-"):
        at_first = {"predictions": [2] * 4, "run": 2, "round": 5, "cluster": 0, "live": False, "choice": "cluster"}
        assert predicted(call) == at_first
        back = call("shoal-edge", "rollback", "dev-1")
        assert back.out == "run 1, round 5 answers until a later run finishes\n"
        assert (predicted(call)["run"], predicted(call)["predictions"]) == (1, [1] * 4)
        assert call("shoal-edge", "models", "dev-1").out.splitlines()[2].endswith("; answers, pinned by rollback")
        assert call("shoal-edge", "rollback", "dev-1", "3", "--json").data == {"run": 3, "round": 5, "cluster": 0}
        assert predicted(call)["run"] == 3
        written = call("shoal-edge", "export", "dev-1", "m.onnx", "--json").data
        assert written == {"file": "m.onnx", "run": 3, "round": 5, "cluster": 0, "live": False, "choice": "cluster"}


def test_rollback_to_a_run_that_is_not_there_names_those_that_are(call, finished):
    made = call("shoal-edge", "rollback", "dev-1", "9", status=3)
    assert "error: this device has no finished model of run 9: it has runs 3, 2, 1\n" in made.err
    assert "hint: give one of them: shoal-edge rollback dev-1 RUN\n" in made.err
    call("shoal-edge", "rollback", "dev-1", "1")
    made = call("shoal-edge", "rollback", "dev-1", status=3)
    assert "error: this device has no finished model older than run 1's: it has runs 3, 2, 1\n" in made.err


def test_a_directory_of_no_device_is_refused(call):
    for command in ("models", "rollback"):
        made = call("shoal-edge", command, "nowhere", status=4)
        assert "error: nowhere belongs to no fleet" in made.err


def test_a_damaged_model_is_refused_and_another_can_answer(call, finished):
    path = call.home / "dev-1/finished" / f"model-{finished.models()[1].own.file.hex()}.bin"
    path.write_bytes(path.read_bytes()[:-1])
    made = call("shoal-edge", "predict", "dev-1", "--data", "d.npz", status=7)
    assert "is damaged" in made.err
    assert "hint: let another finished model answer with `shoal-edge rollback`" in made.err
    call("shoal-edge", "rollback", "dev-1", "1")
    assert predicted(call)["run"] == 1


def test_live_without_a_run_under_way_says_so(call, finished):
    made = call("shoal-edge", "predict", "dev-1", "--data", "d.npz", "--live", status=7)
    assert "dev-1/model.bin does not exist" in made.err
