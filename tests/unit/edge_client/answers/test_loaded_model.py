"""The model in use in another program's process: answers, names, new models, and files that are none."""

import dataclasses
import json
import threading

import numpy as np
import pytest

import shoal
from edge_client.answers.inference import choose, export, in_use
from edge_client.answers.loaded_model import LoadedModel
from edge_client.answers.model_in_use import publish
from edge_client.learning.standardisation import local_scale, standardised
from edge_client.storage.scales import Scales
from shoal.errors import ConfigError, DataError, TaskError
from shoal.task.manifest import TensorSpec
from tests.helpers.models_in_use import NAMED, TASK, finish
from tests.helpers.parties import Parties
from tests.helpers.tasks import logistic_bundle, samples
from tests.helpers.trees import python

EXECUTORS = pytest.mark.parametrize("executor", ["onnxruntime", "numpy"])
X = samples(7)[0]


@pytest.fixture
def directory(tmp_path):
    finish(tmp_path / "device", 1)
    publish(tmp_path / "device")
    return tmp_path / "device"


@EXECUTORS
def test_answers_are_the_devices(tmp_path, executor):
    """`predict` of the command line and of the loaded model, whose parameters end its file, give the same."""
    directory = Parties(tmp_path, "dev-1").members["dev-1"].directory
    own = finish(directory, 1, np.random.default_rng(5).standard_normal(15).astype("<f4"))
    publish(directory)
    np.savez(tmp_path / "d.npz", x=X)
    model, chosen = shoal.load(directory, executor), choose(directory)
    assert model.predict(X).tolist() == [NAMED.labels[c] for c in chosen.predict(tmp_path / "d.npz")]
    np.testing.assert_allclose(model.probabilities(X), chosen.probabilities(tmp_path / "d.npz"), rtol=1e-5)
    assert (model.features, model.labels) == (NAMED.features, NAMED.labels)
    facts = {"run": "1", "round": "9", "run_id": own.run_id.hex(), "validation_accuracy": "0.001", "choice": "cluster"}
    assert facts.items() <= dict(model.facts).items()
    assert (directory / "model.onnx").read_bytes().endswith(in_use(directory).at(None).theta.tobytes())


@EXECUTORS
def test_standardisation_is_inside(tmp_path, executor):
    """Samples are in the units of the data, and a missing value is the mean."""
    task = logistic_bundle(data=dataclasses.replace(NAMED, standardise="local", missing="mean"))
    x = X * np.array([1, 1000, 1, 0], np.float32) + np.array([0, 5e4, 0, 3], np.float32)
    scale = local_scale(x, (1).to_bytes(16))
    theta = np.random.default_rng(0).standard_normal(15).astype(np.float32)
    finish(tmp_path / "device", 1, theta, task=task)
    Scales(tmp_path / "device").save(scale)
    publish(tmp_path / "device")
    x[0, 1] = np.nan
    found = shoal.load(tmp_path / "device", executor).probabilities(x)
    logits = standardised(x, scale) @ theta[:12].reshape(4, 3) + theta[12:]
    powers = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(found, powers / powers.sum(1, keepdims=True), rtol=1e-3, atol=1e-5)


@EXECUTORS
def test_numbers_come_back_as_numbers(tmp_path, executor):
    """A regression answers with its outputs, and has no probabilities, neither here nor in the file."""
    manifest = dataclasses.replace(logistic_bundle().manifest, kind="regression", label=TensorSpec((3,), "float32"))
    task = dataclasses.replace(logistic_bundle(), manifest=manifest)
    export(task, np.ones(15, np.float32), tmp_path / "m.onnx")
    model = LoadedModel(tmp_path / "m.onnx", executor)
    np.testing.assert_allclose(model.predict(X), np.repeat(X.sum(1) + 1, 3).reshape(-1, 3), rtol=1e-5)
    with pytest.raises(ConfigError, match="no probabilities"):
        model.probabilities(X)
    assert model.labels == ()


def test_one_sample_has_one_answer(directory):
    model = shoal.load(str(directory))
    assert model.predict([1, 2, 3, 4]) == "hot"
    assert model.probabilities([1.0, 2.0, 3.0, 4.0]).shape == (3,)
    many = model.predict(np.zeros((250, 4)))
    assert many.tolist() == ["hot"] * 250


@pytest.mark.parametrize("x", [[1, 2, 3], np.zeros((2, 5)), np.zeros((0, 4)), [["a"] * 4], 3.0, np.zeros(4, complex)])
def test_samples_of_another_form_are_refused(directory, x):
    with pytest.raises(DataError, match="the samples are") as caught:
        shoal.load(directory).predict(x)
    assert "volt, amp, rpm, temp" in caught.value.hint


def test_new_model_is_taken_when_asked(directory):
    """A program keeps its model until it asks; then the names and figures are the new one's too, unless the file is bad."""
    model = shoal.load(directory)
    assert not model.reload_if_new()
    finish(directory, 2)
    assert not model.reload_if_new()
    publish(directory)
    assert (model.predict(X)[0], model.facts["run"]) == ("hot", "1")
    assert model.reload_if_new()
    assert (model.predict(X)[0], model.facts["run"]) == ("worn", "2")
    assert not model.reload_if_new()
    for spoil in (lambda p: p.write_bytes(b"\xff" * 40), lambda p: p.unlink()):
        spoil(directory / "in-use" / "current" / "model.onnx")
        with pytest.raises((TaskError, ConfigError)):
            model.reload_if_new()
        assert model.predict(X)[0] == "worn"


def test_other_files_are_refused(tmp_path):
    """A graph of a task is ONNX, and no model: it has no names, and takes theta."""
    with pytest.raises(ConfigError, match=r"no model in .* yet: model\.onnx is missing") as caught:
        shoal.load(tmp_path)
    assert "when a run finishes" in caught.value.hint
    (tmp_path / "model.onnx").write_bytes(TASK.predict)
    with pytest.raises(TaskError, match="no model of Shoal's"):
        shoal.load(tmp_path)


@EXECUTORS
def test_threads_see_whole_models(directory, executor):
    """Eight threads ask and reload while fifty models follow each other: each answer is that of one model."""
    model, wrong, ended = shoal.load(directory, executor), [], threading.Event()
    highest = [0] * 8

    def ask(i):
        while not ended.is_set():
            model.reload_if_new()
            before = int(model.facts["run"])
            top = model.probabilities(X[0]).max()
            run = round(np.log(2 * top / (1 - top)))  # the logit is the run's number
            highest[i] = max(highest[i], run)
            if not before <= run <= before + 50 or abs(np.log(2 * top / (1 - top)) - run) > 1e-2:
                wrong.append((before, run, top))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for run in range(2, 12):
        finish(directory, run)
        publish(directory)
    ended.set()
    for thread in threads:
        thread.join()
    model.reload_if_new()
    assert not wrong
    assert model.facts["run"] == "11"
    assert max(highest) > 1


IMPORTS = """
import json, sys
import shoal
before = [n for n in ("numpy", "paho", "torch", "shoal_lab", "edge_client") if n in sys.modules]
model = shoal.load(sys.argv[1])
answer = str(model.predict([1, 2, 3, 4]))
other = "paho,torch,shoal_lab,shoal.transport,shoal.membership,crypto,typer,pydantic,aggregator".split(",")
heavy = [n for n in other if n in sys.modules]
print(json.dumps([before, answer, heavy]))
"""


def test_a_program_loads_little(directory):
    """`import shoal` loads nothing heavy, and an answer neither transport nor lab nor torch."""
    done = python(IMPORTS, directory)
    assert (json.loads(done.stdout), done.stderr) == ([[], "hot", []], "")
