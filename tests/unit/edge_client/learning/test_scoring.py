"""IFCA's cluster estimate: each model's loss on a device's data, and the model of the smallest.

The nearest of several models to a trained one: distances and cosines in float64, and ties.
"""

import numpy as np
import pytest

from edge_client.learning.data import Dataset
from edge_client.learning.model import OrtModel, Score
from edge_client.learning.scoring import BLOCK, choose, nearest_direction, nearest_model, score
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


RNG = np.random.default_rng(3)


def test_model_at_least_distance_is_chosen():
    models = {m: RNG.standard_normal(BLOCK + 7).astype(np.float32) for m in (1, 4, 6)}
    for target, theta in models.items():
        delta = 0.8 * (theta - models[4])
        assert nearest_model(4, delta, (1, 4, 6), models) == target
    # The last block counts too: the models differ in nothing else.
    end = {0: np.zeros(BLOCK + 7, np.float32), 1: np.zeros(BLOCK + 7, np.float32)}
    end[1][-1] = 1
    assert nearest_model(0, 0.6 * end[1], (0, 1), end) == 1


def test_only_models_to_compare_are_chosen():
    """Only models to compare with are chosen."""
    models = {0: np.zeros(3, np.float32), 1: np.ones(3, np.float32), 2: np.full(3, 2, np.float32)}
    assert nearest_model(0, np.zeros(3, np.float32), (1, 2), models) == 1


@pytest.mark.parametrize(("own", "expected"), [(0, 0), (2, 2), (5, 0)])
def test_tie_goes_to_the_own_model(own, expected):
    """At a tie the model of the device is chosen else the smallest."""
    models = dict.fromkeys((0, 2, 5), np.zeros(4, np.float32))
    compare = (0, 2) if own == 5 else (0, 2, 5)
    assert nearest_model(own, np.ones(4, np.float32), compare, models) == expected


def test_tiny_differences_count():
    """The sum theta + delta in float32 would be the same for both."""
    models = {0: np.full(2, 1e6, np.float32), 1: np.full(2, 1e6, np.float32)}
    models[1][1] += np.float32(0.0625)
    assert nearest_model(0, np.array([0, 0.0325], np.float32), (0, 1), models) == 1
    assert nearest_model(0, np.array([0, 0.03], np.float32), (0, 1), models) == 0


@pytest.mark.parametrize("length", [5, BLOCK + 7])
def test_highest_cosine_is_chosen(length):
    """The direction of highest cosine is chosen whatever the lengths."""
    rng = np.random.default_rng(length)
    for _ in range(20):
        models = {m: rng.standard_normal(length).astype(np.float32) for m in (1, 4, 6, 9)}
        delta = rng.standard_normal(length).astype(np.float32)
        apart = {m: models[m].astype(np.float64) - models[4] for m in (1, 6, 9)}
        cosines = {m: float(v @ delta) / np.linalg.norm(v) for m, v in apart.items()}
        expected = max(cosines, key=cosines.__getitem__)
        for scale in (1e-6, 1, 1e6):
            assert nearest_direction(4, np.float32(scale) * delta, (1, 6, 9), models) == expected
    # The last block counts too.
    end = {m: np.zeros(length, np.float32) for m in (0, 1, 2)}
    end[1][-1], end[2][-1] = -1, 1
    assert nearest_direction(0, 3 * end[2], (1, 2), end) == 2


def test_direction_is_not_distance():
    """The nearest direction is not the nearest model."""
    models = {0: np.zeros(2, np.float32), 1: np.array([9, 9], np.float32), 2: np.array([1, -1], np.float32)}
    delta = np.array([1, 0.5], np.float32)
    assert nearest_direction(0, delta, (1, 2), models) == 1
    assert nearest_model(0, delta, (1, 2), models) == 2


def test_unmoved_model_has_cosine_0():
    """A model that equals the start has cosine 0 and ties go to the smallest id."""
    models = {m: np.array([0, m % 2], np.float32) for m in range(6)}
    up, down = np.array([0, 1], np.float32), np.array([0, -1], np.float32)
    assert nearest_direction(0, up, (2, 3, 5), models) == 3
    assert nearest_direction(0, down, (3, 2, 4), models) == 2
    assert nearest_direction(0, np.zeros(2, np.float32), (5, 3), models) == 3
