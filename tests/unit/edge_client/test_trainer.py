"""The base of own training code.

The documents' examples of own training code learn, and keep what is private.
"""

import importlib.util

import numpy as np
import pytest

from edge_client.trainer import LocalTraining, Trainer
from tests.helpers.own_trainers import Softmax
from tests.helpers.tasks import CLASSES, INPUTS, samples
from tests.helpers.trees import ROOT


class Mean(Trainer):
    """The example of the module."""

    name, version = "mean", "1"

    def layout(self):
        return {"mean": ()}

    def train(self, theta, x, y, recipe, _seed):
        losses = self.losses(theta, x, y)
        theta += recipe.lr * (y.mean() - theta)
        return float(losses.mean()), 1

    def losses(self, theta, _x, y):
        return (theta - y) ** 2

    def predict(self, theta, x):
        return np.broadcast_to(theta, len(x))


def test_parts_are_views_in_order():
    trainer, theta = Softmax(), np.zeros(INPUTS * CLASSES + 1, np.float32)
    trainer.split(theta)["weight"][0, 1] = 5
    trainer.split(theta)["rounds"] += 2
    assert (theta[1], theta[-1], np.count_nonzero(theta)) == (5, 2, 2)


def test_right_labels_are_counted():
    """Classes by the largest score; numbers have none."""
    theta, (x, y) = np.ones(INPUTS * CLASSES + 1, np.float32), samples(20)
    assert Softmax().correct(theta, x, y) == (y == 0).sum()
    assert Mean().correct(np.zeros(1, np.float32), x, np.zeros(20, np.float32)) == 0


def test_the_example_trains():
    theta, x, y = np.zeros(1, np.float32), np.zeros((4, 1), np.float32), np.full(4, 8, np.float32)
    assert Mean().train(theta, x, y, LocalTraining(lr=0.5), 1) == (64.0, 1)
    assert theta == 4


def test_the_rest_is_the_operators():
    with pytest.raises(NotImplementedError):
        Trainer().layout()


RECIPE = LocalTraining(epochs=3, batch_size=16, lr=0.05, momentum=0.5)


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start_of(trainer, written, monkeypatch, folder):
    """Return the vector in the layout that the example's program writes."""
    monkeypatch.chdir(folder)
    np.savez("layout.npz", **written)
    with np.load("layout.npz") as archive:
        assert {name: archive[name].shape for name in archive.files} == trainer.layout()
        return np.concatenate([archive[name].ravel() for name in archive.files]).astype(np.float32)


def boxes(n, seed=0):
    """Return images with a bright square in half of them, and their labels."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 0.1, (n, 1, 16, 16)).astype(np.float32)
    y = np.zeros((n, 5), np.float32)
    for image, label in zip(x[::2], y[::2], strict=True):
        top, left = rng.integers(0, 10, 2)
        image[0, top : top + 6, left : left + 6] += 1
        label[:] = 1, left / 16, top / 16, 6 / 16, 6 / 16
    return x, y


def test_sklearns_sgd_learns(tmp_path, monkeypatch):
    module = example("sgd_trainer")
    trainer = module.SgdTrainer()
    shapes = trainer.layout()
    theta = start_of(trainer, {k: np.zeros(shape) for k, shape in shapes.items()}, monkeypatch, tmp_path)
    x, _ = samples(200)
    y = x[:, :3].argmax(1)
    first, again = theta.copy(), theta.copy()
    before = trainer.losses(theta, x, y).mean()
    trainer.train(first, x, y, RECIPE, 3)
    trainer.train(again, x, y, RECIPE, 3)
    assert first.tobytes() == again.tobytes(), "a round that is trained again gives the same"
    assert trainer.losses(first, x, y).mean() < 0.8 * before
    assert trainer.correct(first, x, y) > 150


@pytest.mark.torch
@pytest.mark.slow
def test_torchs_detector_keeps_its_own(tmp_path, monkeypatch):
    module = example("detector_trainer")
    trainer = module.Detector()
    theta = start_of(trainer, {k: v.numpy() for k, v in trainer.state.items()}, monkeypatch, tmp_path)
    private = [name for name in trainer.layout() if ".running_" in name]
    assert list(trainer.layout())[-len(private) :] == private
    x, y = boxes(64)
    before = trainer.losses(theta, x, y).mean()
    own = theta.copy()
    for _ in range(3):
        trainer.train(own, x, y, RECIPE, 3)
    assert trainer.losses(own, x, y).mean() < 0.7 * before
    moved = trainer.split(own)[private[0]] - trainer.split(theta)[private[0]]
    assert np.abs(moved).max() > 0
    assert trainer.predict(own, x).shape == (64, 5)
