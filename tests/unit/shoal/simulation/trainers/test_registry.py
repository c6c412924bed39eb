"""The trainers by name, and the rule that picks one for a network."""

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.simulation.data import Shard
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.conv import Convolved
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Linear, Lstm, OneHidden, Softmax
from shoal.simulation.trainers.registry import make_trainer

pytestmark = pytest.mark.torch

SHELF = Shelf([Shard(np.zeros((2, 4), np.float32), np.zeros(2, np.int64))])


@pytest.mark.parametrize(
    ("name", "network", "kind"),
    [
        ("auto", Linear(4), Dual),
        ("auto", Softmax(4, 3), Dual),
        ("auto", OneHidden(4, 2, 3), Dual),
        ("dual", Softmax(4, 3), Dual),
        ("loop", Softmax(4, 3), Loop),
        ("auto", Cnn(side=16), Convolved),
        ("conv", Cnn(side=16), Convolved),
        ("auto", Cnn(side=16, filters=(32, 64), kernel=3, same=True), Loop),
        ("conv", Cnn(side=16, filters=(32, 64), kernel=3, same=True), Convolved),
        ("auto", Cnn(side=16, filters=(16, 16), same=True), Loop),
        ("auto", Cnn(side=16, filters=(8, 16), kernel=3, dense=(500,), same=True), Convolved),
        ("auto", Cnn(side=28, filters=(8, 16), kernel=3, dense=(2000,), same=True), Loop),
        ("loop", Cnn(side=16), Loop),
        ("auto", Cnn(side=16, filters=()), Loop),
        ("auto", Lstm(5, 3, 3, 1), Loop),
    ],
)
def test_a_name_or_the_network_decides(name, network, kind):
    assert type(make_trainer(name, network, SHELF)) is kind


def test_refusals_name_the_trainers():
    """The refusals say which trainers there are."""
    with pytest.raises(UsageError, match="no trainer 'fast'") as caught:
        make_trainer("fast", Softmax(4, 3), SHELF)
    assert caught.value.hint == "there are auto, dual, conv, loop"
    for name, network in (("dual", Lstm(5, 3, 3, 1)), ("conv", Cnn(side=16, filters=())), ("dual", Cnn(side=16))):
        with pytest.raises(UsageError, match=f"trainer {name} can't train a {type(network).__name__}") as caught:
            make_trainer(name, network, SHELF)
        assert caught.value.hint == "take trainer auto or loop"
