"""The trainers by name, and the choice of one for a network, its data and a recipe."""

import dataclasses

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.simulation.data import Shard
from shoal.simulation.trainers import registry
from shoal.simulation.trainers.batched import Batched
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.conv import Convolved
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Linear, Lstm, OneHidden, Softmax
from shoal.simulation.trainers.registry import Fastest, make_trainers
from shoal.simulation.trainers.stepwise import Stepwise
from tests.helpers.trainers import CLIPPED, PLAIN

pytestmark = pytest.mark.torch

EPOCH = dataclasses.replace(PLAIN, epochs=1, steps=0, batch_size=10)


def shelf_of(*sizes, inputs=4):
    return Shelf([Shard(np.zeros((n, inputs), np.float32), np.zeros(n, np.int64)) for n in sizes])


@pytest.mark.parametrize(
    ("name", "network", "kind"),
    [
        ("dual", Softmax(4, 3), Dual),
        ("batched", Softmax(4, 3), Batched),
        ("stepwise", Softmax(4, 3), Stepwise),
        ("loop", Softmax(4, 3), Loop),
        ("auto", Cnn(side=16), Convolved),
        ("batched", Cnn(side=16), Convolved),
        ("loop", Cnn(side=16), Loop),
        ("auto", Cnn(side=16, filters=()), Loop),
        ("auto", Lstm(5, 3, 3, 1), Loop),
    ],
)
def test_a_name_or_a_network_decides_on_the_trainer(name, network, kind):
    trainers = make_trainers(name, network, shelf_of(2))
    assert type(trainers.trainer(np.arange(1), PLAIN)) is kind


def test_the_refusals_say_which_trainers_there_are():
    with pytest.raises(UsageError, match="no trainer 'fast'") as caught:
        make_trainers("fast", Softmax(4, 3), shelf_of(2))
    assert caught.value.hint == "there are auto, loop, batched, dual, stepwise"
    with pytest.raises(UsageError, match="trainer batched can't train a Lstm") as caught:
        make_trainers("batched", Lstm(5, 3, 3, 1), shelf_of(2))
    assert caught.value.hint == "take trainer auto or loop"
    with pytest.raises(UsageError, match="dual"):
        make_trainers("dual", Cnn(side=16), shelf_of(2))


def chosen(network, sizes, local, **options):
    return Fastest(network, shelf_of(*sizes, inputs=network.inputs)).name(np.arange(len(sizes)), local, **options)


def test_dense_networks_get_the_trainer_of_least_estimated_time(monkeypatch):
    """The estimate is asked once for each work, with the blocks that each trainer would cut."""
    asked = []

    def estimate(name, work):
        asked.append((name, work.blocks))
        return {"dual": 3.0, "batched": 2.0, "stepwise": 1.0}[name]

    monkeypatch.setattr(registry, "seconds", estimate)
    fleet = Fastest(OneHidden(4, 1000, 3), shelf_of(*[4] * 400))
    ids = np.arange(400)
    assert fleet.name(ids, EPOCH) == "stepwise"
    blocks = {name: len(fleet.shelf.parts(ids, *trainer.limits(1))) for name, trainer in fleet.trainers.items()}
    assert len(set(blocks.values())) > 1
    assert dict(asked) == blocks
    assert fleet.trainer(ids[::-1], EPOCH) is fleet.trainers["stepwise"]
    assert len(asked) == 3
    assert fleet.name(ids, dataclasses.replace(EPOCH, momentum=0.5)) == "batched"


def test_no_trainer_is_chosen_for_work_that_it_can_not_take(monkeypatch):
    """Clipping needs a gradient, momentum and full batches are not stepwise, and a kernel is no larger than the data."""
    monkeypatch.setattr(registry, "seconds", lambda name, _work: ("stepwise", "dual", "batched").index(name))
    network = Softmax(12, 3)
    assert chosen(network, [12, 3], EPOCH) == "stepwise"
    assert chosen(network, [12, 3], dataclasses.replace(EPOCH, momentum=0.5)) == "dual"
    assert chosen(network, [12, 3], PLAIN) == "dual"
    assert chosen(network, [13, 3], PLAIN) == "batched"
    assert chosen(network, [12, 3], CLIPPED) == "batched"
    assert chosen(Linear(12), [12, 3], EPOCH) == "dual"


@pytest.mark.parametrize(
    ("network", "sizes", "local", "expected"),
    [
        (OneHidden(784, 200, 10), [200] * 100, EPOCH, "dual"),
        (OneHidden(784, 200, 10), [200] * 100, dataclasses.replace(PLAIN, steps=10), "dual"),
        (OneHidden(784, 200, 10), [3000] * 3, dataclasses.replace(EPOCH, batch_size=64), "batched"),
        (OneHidden(64, 32, 10), [200] * 100, EPOCH, "batched"),
        (
            Softmax(784, 10),
            np.geomspace(10, 300, 20).astype(int).tolist(),
            dataclasses.replace(EPOCH, epochs=5),
            "stepwise",
        ),
    ],
)
def test_the_choice_for_well_known_work_is_the_measured_one(network, sizes, local, expected):
    """Cases in which one trainer took at most two thirds of the others' time."""
    assert chosen(network, sizes, local) == expected
