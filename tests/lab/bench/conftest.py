"""A lab with small made-up images, on which a training takes a millisecond."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.lab import CLASSES, Images, Lab
from shoal_lab.bench.privacy.benchmark import one_thread

SIDE = 4


def images(count, seed):
    """Return images of 16 grey levels whose label is the brightest of their first ten pixels."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % CLASSES
    x = rng.integers(0, 7, (count, SIDE * SIDE)).astype(np.float32) / 16
    x[np.arange(count), y] = 1.0
    return Images(x, y.astype(np.int64))


@pytest.fixture(scope="session")
def lab(compile_once):
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal_lab.bench.attacks.lab.compile_task", compile_once)
        made = Lab(images(400, 1), images(400, 2), SIDE, quick=True)
        assert made.length == made.origin.size
        yield made
