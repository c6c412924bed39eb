"""The base of own training code."""

import numpy as np
import pytest

from edge_client.trainer import LocalTraining, Trainer
from tests.helpers.own_trainers import Softmax
from tests.helpers.tasks import CLASSES, INPUTS, samples


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
