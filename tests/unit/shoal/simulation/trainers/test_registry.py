"""The trainers by name, and the choice of one for a network."""

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.simulation.data import Shard
from shoal.simulation.trainers.batched import Batched
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.conv import Convolved
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Linear, Lstm, Softmax
from shoal.simulation.trainers.registry import make_trainer
from shoal.simulation.trainers.stepwise import Stepwise

pytestmark = pytest.mark.torch


def test_trainers_by_name():
    """The dual form needs a dense network; auto finds a trainer for any."""
    cnn = Cnn(side=16)
    shelf = Shelf([Shard(np.zeros((2, 256), np.float32), np.zeros(2, np.int64))])
    assert make_trainer("auto", cnn, shelf).limits(1)
    with pytest.raises(UsageError, match="dual"):
        make_trainer("dual", cnn, shelf)


@pytest.mark.parametrize(
    ("name", "network", "kind"),
    [
        ("auto", Softmax(4, 3), Dual),
        ("dual", Softmax(4, 3), Dual),
        ("batched", Softmax(4, 3), Batched),
        ("stepwise", Softmax(4, 3), Stepwise),
        ("stepwise", Linear(4), Dual),
        ("loop", Softmax(4, 3), Loop),
        ("auto", Cnn(side=16), Convolved),
        ("batched", Cnn(side=16), Convolved),
        ("loop", Cnn(side=16), Loop),
        ("auto", Cnn(side=16, filters=()), Loop),
        ("auto", Lstm(5, 3, 3, 1), Loop),
    ],
)
def test_a_network_gets_the_fastest_trainer_that_can_train_it(name, network, kind):
    shelf = Shelf([Shard(np.zeros((2, 4), np.float32), np.zeros(2, np.int64))])
    trainer = make_trainer(name, network, shelf)
    assert type(trainer) is kind
    if kind is Dual:
        assert trainer.always is (name == "dual")


def test_the_refusals_say_which_trainers_there_are():
    shelf = Shelf([Shard(np.zeros((2, 4), np.float32), np.zeros(2, np.int64))])
    with pytest.raises(UsageError, match="no trainer 'fast'") as caught:
        make_trainer("fast", Softmax(4, 3), shelf)
    assert caught.value.hint == "there are auto, loop, batched, dual, stepwise"
    with pytest.raises(UsageError, match="trainer batched can't train a Lstm") as caught:
        make_trainer("batched", Lstm(5, 3, 3, 1), shelf)
    assert caught.value.hint == "take trainer auto or loop"
