"""IFCA's cluster estimate: each model's loss on a device's data, and the model of the smallest."""

import numpy as np
import pytest

from edge_client.learning.data import Dataset
from edge_client.learning.model import OrtModel, Score
from edge_client.learning.scoring import choose, score
from shoal.errors import TaskError
from tests.helpers.tasks import samples


class Backend:
    """Scores a model by its first coordinate, and records the samples it was given."""

    def __init__(self):
        self.seen = []

    def score(self, theta, x, y):
        self.seen.append((x, y))
        return Score(float(theta[0]), 0, 4)


def test_every_model_is_scored():
    """Every model is scored on all samples in order."""
    backend, batch = Backend(), Dataset(*samples(4))
    models = [np.full(15, loss, np.float32) for loss in (0.5, 0.25, 2.0)]
    assert score(models, batch, backend).tolist() == [0.5, 0.25, 2.0]
    assert all(x is batch.x and y is batch.y for x, y in backend.seen)
    assert score([], batch, backend).shape == (0,)


def test_scoring_picks_the_model_that_fits(logistic):
    backend = OrtModel(logistic(4, 3))
    rng = np.random.default_rng(9)
    models = [rng.standard_normal(15).astype(np.float32) for _ in range(4)]
    x, _ = samples(60)
    batch = Dataset(x, backend.predict(models[2], x).argmax(1))
    losses = score(models, batch, backend)
    assert losses.dtype == np.float64
    assert losses.shape == (4,)
    assert choose(losses) == 2


def test_choose_never_takes_nan():
    """Choose takes the lowest index on ties and never nan."""
    assert choose(np.array([2.0, 1.0, 1.0])) == 1
    assert choose(np.array([np.nan, 3.0, np.nan])) == 1
    assert choose(np.array([np.inf, np.nan])) == 0
    for hopeless in ([np.nan, np.nan], []):
        with pytest.raises(TaskError, match="no model has a usable loss"):
            choose(np.array(hopeless, dtype=np.float64))


def test_infinite_is_better_than_none():
    """An infinite loss is worse than a finite one and better than none."""
    assert choose(np.array([np.inf, 1e300])) == 1
    assert choose(np.array([np.nan, np.inf, np.inf])) == 1


def test_all_nan_says_what_to_check():
    """The error of a device whose losses are all nan says what to check."""
    with pytest.raises(TaskError) as caught:
        choose(np.array([np.nan]))
    assert caught.value.hint == "check the data, lower the learning rate"
