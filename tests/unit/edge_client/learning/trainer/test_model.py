"""Own training code in a real process, as the backend of a task.

The backend of a task on a device.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from edge_client.learning import scoring
from edge_client.learning.data import Dataset
from edge_client.learning.executor.choice import TrainerCommand
from edge_client.learning.model import NumpyModel, OrtModel
from edge_client.learning.trainer.model import TrainerModel, device_model, make_model
from edge_client.learning.training import train
from shoal.errors import TaskError, TrainerError
from shoal.protocol.recipe import LocalTraining
from tests.helpers import own_trainers
from tests.helpers.own_trainers import Softmax, bundle, command
from tests.helpers.tasks import CLASSES, INPUTS, logistic_bundle, samples

X, Y = samples(40)
SHARE = Dataset(X, Y)
LENGTH = INPUTS * CLASSES + 1
THETA = np.linspace(-1, 1, LENGTH, dtype=np.float32)
RECIPE = LocalTraining(epochs=3, lr=0.5, lr_decay=0.5)


def never():
    return False


def trained(backend, seed=0, round_=1):
    return train(THETA, SHARE, RECIPE, backend, np.random.default_rng(seed), round_, never)


@pytest.fixture(scope="module")
def backend():
    return TrainerModel(bundle(), command())


def test_figures_are_those_of_the_class(backend):
    own = Softmax()
    losses = own.losses(THETA, X, Y)
    np.testing.assert_allclose(backend.losses(THETA, X, Y), losses)
    score = backend.score(THETA, X, Y)
    assert (score.mean_loss, score.correct, score.count) == (pytest.approx(losses.mean()), own.correct(THETA, X, Y), 40)
    np.testing.assert_array_equal(backend.predict(THETA, X), own.predict(THETA, X))
    np.testing.assert_allclose(scoring.score([THETA, -THETA], SHARE, backend)[0], losses.mean())
    np.testing.assert_allclose(scoring.sample_losses(THETA, SHARE, backend), losses)


def test_training_is_the_recipes(backend):
    """A round's step size has its decay; the private count moves with the model."""
    result = trained(backend)
    expected = THETA.copy()
    own = Softmax()
    loss, steps = own.train(expected, X, Y, LocalTraining(epochs=3, lr=0.25), 0)
    np.testing.assert_array_equal(result.delta, expected - THETA)
    assert (result.mean_loss, result.steps, result.delta[-1]) == (pytest.approx(loss), steps, 1)


def test_no_gradient_is_given(backend):
    with pytest.raises(TaskError, match="no gradient"):
        backend.grad(THETA, X, Y)


@pytest.mark.parametrize(
    ("trainer", "limits", "words"),
    [
        (own_trainers.Raises, {}, "the trainer failed: RuntimeError: the camera is gone"),
        (own_trainers.Exits, {}, "process ended with status 3"),
        (own_trainers.Dies, {}, "process was ended by signal 6"),
        (own_trainers.Eats, {}, "MemoryError"),
        (own_trainers.NotFinite, {}, "numbers that are not finite"),
        (own_trainers.Newer, {}, "the task is for softmax 1, and this device has softmax 2"),
        (own_trainers.Wider, {}, "layout has weight (4, 3) where this device's has weight (4, 4)"),
        (own_trainers.Hangs, {"most_s": 0.5}, "has not answered for 0.5 seconds"),
    ],
)
def test_a_failure_has_its_reason(trainer, limits, words):
    with pytest.raises(TaskError) as caught:
        trained(TrainerModel(bundle(), command(trainer, **limits)))
    assert words in str(caught.value)


def test_memory_has_a_limit():
    """Numpy alone takes more than 1 MB, so the process can't even begin."""
    with pytest.raises(TrainerError):
        TrainerModel(bundle(), command(most_mb=1)).begin()


def test_the_next_call_begins_anew(tmp_path, monkeypatch):
    """After a failure; here the class exits until a file is there."""
    sign = tmp_path / "sign"
    (tmp_path / "flaky_trainer.py").write_text(
        "import os, sys\nfrom tests.helpers.own_trainers import Softmax\n"
        "class Flaky(Softmax):\n    def train(self, *rest):\n"
        f"        return super().train(*rest) if os.path.exists({str(sign)!r}) else sys.exit(5)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    flaky = TrainerModel(bundle(), TrainerCommand("flaky_trainer:Flaky"))
    with pytest.raises(TrainerError, match="status 5"):
        trained(flaky)
    sign.touch()
    assert trained(flaky).steps == 3


def test_it_gets_no_secret_and_no_descriptor(monkeypatch, capfd):
    """It has stdin, stdout, stderr, its socket, the request's memory, and while it looks the folder of its descriptors."""
    monkeypatch.setenv("SHOAL_PASSPHRASE_FILE", "/secret")
    with Path(os.devnull).open() as held:
        os.set_inheritable(held.fileno(), True)
        assert TrainerModel(bundle(), command(own_trainers.Chatters)).score(THETA, X, Y).correct == 6
    assert capfd.readouterr().err.count("on st") == 2


def test_the_setting_chooses_the_model():
    """And the task chooses own code; a device without it says so."""
    for setting, kind in (("numpy", NumpyModel), ("onnxruntime", OrtModel), ("auto", OrtModel)):
        assert isinstance(make_model(setting)(logistic_bundle(), 1), kind)
    assert isinstance(device_model(logistic_bundle()), OrtModel)
    assert isinstance(make_model("auto", command())(bundle(), 1), TrainerModel)
    assert isinstance(make_model("numpy", command())(logistic_bundle(), 1), NumpyModel)
    with pytest.raises(TrainerError, match="needs the trainer softmax 1, and this device has none"):
        device_model(bundle())
