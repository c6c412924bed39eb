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


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ([2.0, 1.0, 1.0], 1),
        ([np.nan, 3.0, np.nan], 1),
        ([np.inf, np.nan], 0),
        ([np.inf, 1e300], 1),
        ([np.nan, np.inf, np.inf], 1),
    ],
)
def test_choose_never_takes_nan(losses, chosen):
    """Choose takes the lowest index on ties; an infinite loss is worse than a finite one and better than none."""
    assert choose(np.array(losses)) == chosen


@pytest.mark.parametrize("hopeless", [[np.nan, np.nan], []])
def test_all_nan_says_what_to_check(hopeless):
    with pytest.raises(TaskError, match="no model has a usable loss") as caught:
        choose(np.array(hopeless, dtype=np.float64))
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


def vectors(*values):
    """Return models numbered from 0."""
    return {m: np.array(value, np.float32) for m, value in enumerate(values)}


FAR = vectors([0, 0], [9, 9], [1, -1])
SAME = dict.fromkeys((0, 2, 5), np.zeros(2, np.float32))
# The sum theta + delta in float32 would be the same for both.
CLOSE = vectors([1e6, 1e6], [1e6, np.float32(1e6) + np.float32(0.0625)])
# Those that equal the start have cosine 0.
UNMOVED = {m: np.array([0, m % 2], np.float32) for m in range(6)}


@pytest.mark.parametrize(
    ("nearest", "own", "delta", "compare", "models", "expected"),
    [
        pytest.param(nearest_model, 0, [0, 0], (1, 2), vectors([0, 0], [1, 1], [2, 2]), 1, id="own is not compared"),
        pytest.param(nearest_model, 0, [1, 1], (0, 2, 5), SAME, 0, id="tie: own"),
        pytest.param(nearest_model, 2, [1, 1], (0, 2, 5), SAME, 2, id="tie: own, not the smallest"),
        pytest.param(nearest_model, 5, [1, 1], (0, 2), SAME, 0, id="tie: the smallest"),
        pytest.param(nearest_model, 0, [0, 0.0325], (0, 1), CLOSE, 1, id="tiny differences"),
        pytest.param(nearest_model, 0, [0, 0.03], (0, 1), CLOSE, 0, id="tinier differences"),
        pytest.param(nearest_direction, 0, [1, 0.5], (1, 2), FAR, 1, id="direction is not distance"),
        pytest.param(nearest_model, 0, [1, 0.5], (1, 2), FAR, 2, id="distance is not direction"),
        pytest.param(nearest_direction, 0, [0, 1], (2, 3, 5), UNMOVED, 3, id="tie of moved ones"),
        pytest.param(nearest_direction, 0, [0, -1], (3, 2, 4), UNMOVED, 2, id="cosine 0 is more than -1"),
        pytest.param(nearest_direction, 0, [0, 0], (5, 3), UNMOVED, 3, id="no direction"),
    ],
)
def test_the_nearest_of_few(nearest, own, delta, compare, models, expected):
    assert nearest(own, np.array(delta, np.float32), compare, models) == expected


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
