"""The networks of CFL's image experiments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shoal_lab.experiments.cfl.networks import network_for
from shoal_lab.experiments.data.datasets import Dataset

from shoal.errors import UsageError
from shoal.simulation.trainers.networks import Cnn, Network, OneHidden


def images(*shape: int) -> Dataset:
    x, y = np.zeros((1, *shape), np.float32), np.zeros(1, np.int64)
    return Dataset(name="toy", x_train=x, y_train=y, x_test=x, y_test=y, origin=Path())


@pytest.mark.parametrize(
    ("model", "shape", "network"),
    [
        ("cnn", (3, 32, 32), Cnn(channels=3, side=32)),
        ("cnn", (28, 28), Cnn(channels=1, side=28)),
        ("mlp", (3, 32, 32), OneHidden(3072, 30, 10)),
        ("mlp", (28, 28), OneHidden(784, 30, 10)),
    ],
)
def test_networks_follow_the_data(model: str, shape: tuple[int, ...], network: Network) -> None:
    """Colour images give three channels, and an MLP takes all pixels of all channels."""
    assert network_for(model, images(*shape), 30) == network


def test_an_unknown_network_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="no network 'tree'") as caught:
        network_for("tree", images(28, 28), 30)
    assert caught.value.hint == "there are cnn and mlp"
