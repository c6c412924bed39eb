"""`shoal-edge models` and `rollback`, with the commands that answer: output and exit statuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edge_client.storage.finished_models import FinishedModels, Validation
from edge_client.storage.scales import Scale, Scales
from edge_client.storage.state import OwnModel
from shoal.task.data_declaration import DataDeclaration
from shoal.util.files import exclusive
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
        f"run {run}; finished 2027-01-15T08:00:0{run}Z; fedavg, cluster 0; validation accuracy {accuracy}, loss 0.5, "
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
        "chosen_by_owner": False,
    }


def test_no_finished_models_list_none(call, fleet):
    """A device without finished models lists none."""
    told = call("shoal-edge", "models", "dev-1")
    assert (told.out, told.err) == ("", "no run has finished on this device yet\n")
    assert call("shoal-edge", "models", "dev-1", "--json").data == {"models": []}


def test_rollback_names_the_runs_there_are(call, finished):
    """A rollback to a run that is not there names those that are."""
    made = call("shoal-edge", "rollback", "dev-1", "9", status=2)
    assert "error: this device has no finished model of run 9: it has runs 3, 2, 1\n" in made.err
    assert "hint: give one of them: shoal-edge rollback dev-1 RUN\n" in made.err
    call("shoal-edge", "rollback", "dev-1", "1")
    made = call("shoal-edge", "rollback", "dev-1", status=3)
    assert "error: this device has no finished model older than run 1's: it has runs 3, 2, 1\n" in made.err


def test_rollback_changes_answers_at_once(call, finished):
    """The device's directory is locked, as by `shoal-edge run`."""
    with exclusive(call.home / "dev-1", wait_s=0, hint="-"):
        at_first = {"predictions": [2] * 4, "run": 2, "round": 5, "cluster": 0, "live": False, "choice": "cluster"}
        assert predicted(call) == at_first
        back = call("shoal-edge", "rollback", "dev-1")
        assert back.out == "run 1 answers until a later run finishes\n"
        assert (predicted(call)["run"], predicted(call)["predictions"]) == (1, [1] * 4)
        assert call("shoal-edge", "models", "dev-1").out.splitlines()[2].endswith("; answers, pinned by rollback")
        assert call("shoal-edge", "rollback", "dev-1", "3", "--json").data == {"run": 3, "round": 5, "cluster": 0}
        assert predicted(call)["run"] == 3
        written = call("shoal-edge", "export", "dev-1", "m.onnx", "--json").data
        assert written == {"file": "m.onnx", "run": 3, "round": 5, "cluster": 0, "live": False, "choice": "cluster"}


def test_damaged_model_lets_another_answer(call, finished):
    """A damaged model is refused and another can answer, and so is --live without a run under way."""
    path = call.home / "dev-1/finished" / f"model-{finished.models()[1].own.file.hex()}.bin"
    path.write_bytes(path.read_bytes()[:-1])
    made = call("shoal-edge", "predict", "dev-1", "--data", "d.npz", status=7)
    assert "is damaged" in made.err
    assert "hint: let another finished model answer with `shoal-edge rollback`" in made.err
    made = call("shoal-edge", "predict", "dev-1", "--data", "d.npz", "--live", status=7)
    assert "dev-1/model.bin does not exist" in made.err
    call("shoal-edge", "rollback", "dev-1", "1")
    assert predicted(call)["run"] == 1


# ------------------------------------------------------------------------------------------------------- evaluate


@pytest.fixture
def named(call, fleet):
    """A finished model that answers fox, of a task with names whose features are standardised; return the device's store."""
    data = DataDeclaration(
        features=("a", "b", "c", "d"), label="animal", labels=("cat", "dog", "fox"), standardise="local", missing="mean"
    )
    bundle = dataclasses.replace(BUNDLE, manifest=dataclasses.replace(BUNDLE.manifest, data=data))
    own = OwnModel(1, b"r" * 16, 5, 0, theta(2))
    figures = {own.run_id: Validation(0.5, 10, 20, 20)}
    store = FinishedModels(call.home / "dev-1")
    store.add(own, [], bundle, algorithm="fedavg", at_s=1_800_000_000, figures=figures)
    Scales(call.home / "dev-1").save(Scale(own.run_id, (1.0,) * 4, (2.0,) * 4))
    (call.home / "d.csv").write_text("d;b;animal;a;c\n1;NA;fox;2;3\n1;2;cat;3;4\n0;0;fox;0;0\n")
    return store


def test_table_is_evaluated_beside_majority(call, named):
    """A table is evaluated beside the most common label."""
    told = call("shoal-edge", "evaluate", "dev-1", "d.csv")
    assert told.out.splitlines()[0] == "accuracy 66.7% on 3 samples; the most common label, fox, alone 66.7%"
    assert told.err == "warning: the model is no better than a guess that looks at no sample\n"
    found = call("shoal-edge", "evaluate", "dev-1", "d.csv", "--json").data
    assert (found["samples"], found["no_better"], found["run"]) == (3, True, 1)
    assert found["confusion"] == [[0, 0, 1], [0, 0, 0], [0, 0, 2]]
    assert call("shoal-edge", "predict", "dev-1", "--data", "d.csv").out == "fox\nfox\nfox\n"


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        (
            "a;b;c;d;animal\n1;2;3;4;cow\n",
            "d.csv, line 2, column 5: 'cow' is no label of the task",
            "labels: cat, dog, fox",
        ),
        (
            "a;b;c;animal\n1;2;3;cat\n",
            "d.csv has no column 'd', which the task takes",
            "its columns are: a, b, c, animal",
        ),
        ("a;b;c;d;kind\n1;2;3;4;cat\n", "d.csv has no column 'animal'", "name the label column with --label"),
    ],
)
def test_unfit_table_is_named_with_its_place(call, named, text, error, hint):
    """Status 8."""
    (call.home / "d.csv").write_text(text)
    told = call("shoal-edge", "evaluate", "dev-1", "d.csv", status=8)
    assert f"error: {error}" in told.err
    assert hint in told.err


def test_label_column_and_separator_are_told(call, named):
    """The label column and the separator are given."""
    (call.home / "d.csv").write_text("a:b:c:d:kind\n1:2:3:4:fox\n")
    found = call("shoal-edge", "evaluate", "dev-1", "d.csv", "--label", "kind", "--json", SHOAL_EDGE_SEPARATOR=":").data
    assert found["accuracy"] == 1.0
    told = call("shoal-edge", "evaluate", "dev-1", "d.csv", status=3, SHOAL_EDGE_SEPARATOR="::")
    assert "error: the separator is one character or tab, not '::'" in told.err


def test_lost_scale_is_an_error(call, named):
    """Status 7: the model takes standardised samples."""
    for path in (call.home / "dev-1" / "scales").iterdir():
        path.unlink()
    told = call("shoal-edge", "predict", "dev-1", "--data", "d.csv", status=7)
    assert "error: the device has no scale of the run whose model is asked for" in told.err
