"""Predictions and exports: which model answers, one node or the ensemble, and a device that has none.

The exported file runs in plain ONNX Runtime, with x as its only input.
"""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from edge_client.answers import inference
from edge_client.answers.inference import Chosen, choose, export
from edge_client.answers.loaded_model import probabilities_of
from edge_client.learning.model import OrtModel
from edge_client.storage.finished_models import FinishedModels, PersonalChoice, Validation
from edge_client.storage.scales import Scale
from edge_client.storage.state import DeviceState, OwnModel
from shoal.errors import ConfigError, DataError, IntegrityError, TaskError
from shoal.task.manifest import TensorSpec
from tests.helpers.parties import Parties
from tests.helpers.plans import run_plan
from tests.helpers.tasks import samples

RUN_ID = b"r" * 16
X = np.eye(4, dtype=np.float32)[:3]


def theta(*winners):
    """Return a model that answers sample i with class ``winners[i]``, (15,) float32; its outputs are 1 and 0."""
    w = np.zeros((4, 3), np.float32)
    w[range(len(winners)), winners] = 1.0
    return np.concatenate([w.ravel(), np.zeros(3, np.float32)])


def model(cluster, *winners, run=1, run_id=RUN_ID):
    return OwnModel(run, run_id, 9, cluster, theta(*winners))


@pytest.fixture
def bundle(logistic):
    return logistic(4, 3)


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "d.npz", x=X)
    return tmp_path / "d.npz"


@pytest.fixture
def directory(tmp_path):
    return Parties(tmp_path, "dev-1").members["dev-1"].directory


PATH = (model(0, 0, 0, 0), model(2, 0, 1, 1), model(5, 0, 1, 2))


@pytest.mark.parametrize(
    ("node", "cluster", "answer"),
    [(None, 5, [0, 1, 2]), (0, 0, [0, 0, 0]), (2, 2, [0, 1, 1]), (5, 5, [0, 1, 2])],
    ids=["own", "root", "above", "own by number"],
)
def test_node_on_path_answers_if_asked_for(bundle, data, node, cluster, answer):
    """The model of the devices own cluster answers by default."""
    chosen = Chosen(bundle, PATH, live=False)
    found = chosen.predict(data, node=node)
    assert (found.tolist(), found.dtype) == (answer, np.int64)
    choice = "cluster" if cluster == 5 else f"node-{node}"
    assert chosen.document(node) == {"run": 1, "round": 9, "cluster": cluster, "live": False, "choice": choice}


def test_regression_answers_with_numbers(bundle, data, tmp_path):
    """An ensemble is the mean of the outputs; a model has no probabilities, and is evaluated by its errors."""
    manifest = dataclasses.replace(bundle.manifest, kind="regression", label=TensorSpec((3,), "float32"))
    regression = Chosen(dataclasses.replace(bundle, manifest=manifest), PATH, live=False)
    found = regression.predict(data, ensemble=True)
    np.testing.assert_allclose(found[2], np.array([1, 1, 1]) / 3, rtol=1e-6)
    np.testing.assert_allclose(found[1], np.array([1, 2, 0]) / 3, rtol=1e-6)
    np.testing.assert_array_equal(regression.predict(data, node=2)[1], [0, 1, 0])
    with pytest.raises(ConfigError, match="has no probabilities"):
        regression.probabilities(data)
    np.savez(tmp_path / "labelled.npz", x=X, y=np.eye(3))
    assert regression.evaluate(tmp_path / "labelled.npz").squared == 0.0


def test_what_can_not_be_answered_is_refused(bundle, data, tmp_path):
    """One node and the ensemble, a node that the device does not hold, and samples that do not fit the task."""
    chosen = Chosen(bundle, PATH, live=False)
    with pytest.raises(ConfigError, match=r"^one node or the ensemble of all, not both$") as caught:
        chosen.predict(data, node=0, ensemble=True)
    assert "--node" in caught.value.hint
    for ask in (lambda: chosen.at(7), lambda: chosen.predict(data, node=7), lambda: chosen.document(7)):
        with pytest.raises(ConfigError, match="7"):
            ask()
    np.savez(tmp_path / "bad.npz", x=np.zeros((3, 5)))
    with pytest.raises(DataError, match=r"bad\.npz"):
        chosen.predict(tmp_path / "bad.npz")


# ------------------------------------------------------------------------------------------- which model is chosen


def finish(directory, bundle, own, above=()):
    """Store the models of a finished run."""
    figures = {own.run_id: Validation(1.0, 1, 2, 2)}
    FinishedModels(directory).add(own, above, bundle, algorithm="fedavg", at_s=1, figures=figures)


@pytest.fixture
def live(directory, bundle, monkeypatch):
    """Store a model of the run under way, whose package is opened without its seals."""
    files = DeviceState(directory)
    files.save_run(b"package")
    files.save_model(model(4, 2, 2, 2, run=8), durable=False)
    plan = run_plan(run=8, run_id=RUN_ID)

    def stored_run(package, membership):
        assert (package, membership.name) == (b"package", "dev-1")
        return type("Run", (), {"plan": plan, "bundle": bundle})

    monkeypatch.setattr(inference, "stored_run", stored_run)
    return files


def test_finished_model_answers_meanwhile(directory, bundle, live, data):
    """A finished model answers though a run is under way, whose model answers if asked for."""
    finish(directory, bundle, model(5, 0, 1, 2), PATH[:2])
    chosen = choose(directory)
    assert (chosen.live, chosen.own.cluster, [m.cluster for m in chosen.models]) == (False, 5, [0, 2, 5])
    assert chosen.predict(data).tolist() == [0, 1, 2]
    assert chosen.predict(data, node=0).tolist() == [0, 0, 0]
    # The third sample gets one vote for each class: the lowest wins; the second has two of three for class 1.
    assert chosen.predict(data, ensemble=True).tolist() == [0, 1, 0]
    under_way = choose(directory, live=True)
    assert under_way.document() == {"run": 8, "round": 9, "cluster": 4, "live": True, "choice": "cluster"}
    assert under_way.predict(data).tolist() == [2, 2, 2]


def personal(directory, name, theta=None):
    choice = PersonalChoice(
        version=1,
        run_id=RUN_ID,
        choice=name,
        by_hand=False,
        fits=(),
        samples=6,
        folds=5,
        took_s=0.1,
        made_at_s=1,
        length=0 if theta is None else len(theta),
    )
    FinishedModels(directory).save_personal(choice, theta)


def test_trained_model_answers(directory, bundle, live, data, tmp_path):
    """The model that the device trained answers unless a node is asked for, or the model above that it chose."""
    finish(directory, bundle, model(5, 0, 1, 2), PATH[:2])
    personal(directory, "10", theta(2, 2, 1))
    chosen = choose(directory)
    assert chosen.predict(data).tolist() == [2, 2, 1]
    assert chosen.predict(data, node=5).tolist() == [0, 1, 2]
    assert chosen.predict(data, ensemble=True).tolist() == [0, 1, 0]
    assert choose(directory, live=True).predict(data).tolist() == [2, 2, 2]
    assert chosen.document()["choice"] == "10"
    assert chosen.document(5)["choice"] == "cluster"
    assert chosen.document(ensemble=True)["choice"] == "ensemble"
    chosen.export(tmp_path / "own.onnx")
    session = onnxruntime.InferenceSession((tmp_path / "own.onnx").read_bytes())
    assert session.run(None, {"x": X})[0].argmax(1).tolist() == [2, 2, 1]
    personal(directory, "node-2")
    above = choose(directory)
    assert above.predict(data).tolist() == [0, 1, 1]
    assert above.document() == {"run": 1, "round": 9, "cluster": 2, "live": False, "choice": "node-2"}


def test_model_of_another_length_is_refused(directory, bundle, live):
    """A personal model of another length is refused."""
    finish(directory, bundle, model(5, 0, 1, 2))
    personal(directory, "10", theta(2)[:-1])
    with pytest.raises(IntegrityError, match="has 14 coordinates, not 15"):
        choose(directory)


def test_model_of_another_run_is_refused(directory, live):
    """A new run has begun, and no round of it has ended: its task may differ."""
    live.save_model(model(4, run=7, run_id=b"o" * 16), durable=False)
    with pytest.raises(IntegrityError, match=r"^the model is of run 7, the task of run 8$") as caught:
        choose(directory)
    assert caught.value.hint == "let the device finish a round of the new run"


def test_missing_model_or_run_is_named(directory):
    """A device without a model or a run says which is missing."""
    with pytest.raises(IntegrityError, match=r"this device has no model yet$"):
        choose(directory)
    DeviceState(directory).save_model(model(4), durable=False)
    with pytest.raises(IntegrityError, match=f"^{directory} holds no run$") as caught:
        choose(directory)
    assert caught.value.hint == "let the device take part in one"


def test_an_export_answers_as_its_model_does(directory, bundle, data, tmp_path):
    finish(directory, bundle, model(5, 0, 1, 2), PATH[:2])
    for node, cluster in ((None, 5), (2, 2)):
        file = tmp_path / f"{cluster}.onnx"
        assert choose(directory).export(file, node=node).cluster == cluster
        session = onnxruntime.InferenceSession(Path(file).read_bytes())
        outputs, _ = session.run(None, {session.get_inputs()[0].name: X})
        assert outputs.argmax(1).tolist() == choose(directory).predict(data, node=node).tolist()


# ------------------------------------------------------------------------------------------------ standardised tasks


def test_a_scale_applies_to_what_is_asked(bundle, tmp_path):
    scale = Scale(RUN_ID, (5.0,) * 4, (10.0,) * 4)
    np.savez(tmp_path / "raw.npz", x=X * 10 + 5, y=np.array([0, 1, 1]))
    chosen = Chosen(bundle, PATH, live=False, scale=scale)
    assert chosen.predict(tmp_path / "raw.npz").tolist() == [0, 1, 2]
    figures = chosen.evaluate(tmp_path / "raw.npz")
    assert (figures.correct, figures.samples, figures.common) == (2, 3, 1)
    found = chosen.probabilities(tmp_path / "raw.npz")
    np.testing.assert_allclose(found[0], np.exp([1, 0, 0]) / np.exp([1, 0, 0]).sum(), rtol=1e-6)


def test_probabilities_of_large_outputs():
    assert probabilities_of(np.array([[1e4, 0.0]], np.float32), "classification").tolist() == [[1.0, 0.0]]


def test_export_is_valid_onnx(bundle, tmp_path):
    """Exported file is valid onnx and needs only x."""
    theta = np.random.default_rng(0).standard_normal(15).astype(np.float32)
    x, _ = samples(8)
    path = tmp_path / "model.onnx"
    export(bundle, theta, path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    outputs, _ = session.run(None, {"x": x})
    np.testing.assert_allclose(outputs, OrtModel(bundle).predict(theta, x), rtol=1e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("theta", [np.zeros(14, np.float32), np.zeros(15), np.full(15, np.nan, np.float32)])
def test_models_that_do_not_fit_are_refused(bundle, tmp_path, theta):
    with pytest.raises(TaskError):
        export(bundle, theta, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_does_not_exist_is_named(bundle, tmp_path):
    path = tmp_path / "none" / "m.onnx"
    with pytest.raises(ConfigError, match="No such file or directory") as caught:
        export(bundle, np.zeros(15, np.float32), path)
    assert str(caught.value).startswith(f"can't write {path}: ")
    assert "check the folder" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
