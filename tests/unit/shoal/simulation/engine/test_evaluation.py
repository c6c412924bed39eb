"""Accuracy of clear models: which model each protocol gives a test shard, and the figures by hand."""

import dataclasses
import math

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel, RoundPlan, final_assignment
from shoal.protocol.messages import Share
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.evaluation import evaluate
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.simulate import sim_plan
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import Softmax
from tests.helpers.simulations import FULL

pytestmark = pytest.mark.torch
NETWORK = Softmax(1, 2)
SAYS_0, SAYS_1 = 3, 7
"""Ids of the models, one that always answers 0 and one that always answers 1."""
ORIGINS = np.array([[0, 0, 5, 0], [0, 0, 0, 5]], np.float32)
RIGHT, WRONG = math.log(1 + math.exp(-5)), 5 + math.log(1 + math.exp(-5))
"""Losses of a right and of a wrong answer."""


def labelled(*labels):
    return Shard(np.zeros((len(labels), 1), np.float32), np.array(labels, np.int64))


TRAIN = (labelled(0, 0), labelled(1), labelled(0))
TEST = (labelled(0, 0, 0, 1), labelled(1, 1), labelled(1))


def final_round(*candidates, names=("dev-0000", "dev-0001", "dev-0002")):
    """Return the final round in which the devices have these candidates; two models where a device has none."""
    given = [*candidates, *[(SAYS_0, SAYS_1)] * (len(names) - len(candidates))]
    models = {SAYS_1: ClusterModel(origin=1), SAYS_0: ClusterModel(origin=0)}
    assignments = {n: final_assignment(c) for n, c in zip(names, given, strict=True)}
    return RoundPlan(9, models, assignments, final=True)


def evaluated(protocol, final=None, **shares):
    population = Population(**{"train": TRAIN, "test": TEST, **shares})
    run = sim_plan("ifca", {"k": "2"}, NETWORK, sim_options(rounds=3, local=FULL))
    return evaluate(Workforce(population, NETWORK, run, ORIGINS), final or final_round(), protocol)


def test_argmin_gives_each_shard_its_best():
    """The third device trained on zeros and is tested on a one: argmin takes the model that answers 1."""
    found = evaluated("argmin")
    assert found.models.tolist() == [SAYS_0, SAYS_1, SAYS_1]
    assert (found.correct.tolist(), found.tested.tolist()) == ([3, 2, 1], [4, 2, 1])
    assert found.accuracy == pytest.approx(100 * 6 / 7)
    assert found.median == 100
    assert found.losses.tolist() == pytest.approx([(3 * RIGHT + WRONG) / 4, RIGHT, RIGHT])
    assert found.loss == pytest.approx((6 * RIGHT + WRONG) / 7)
    assert found.names == ("dev-0000", "dev-0001", "dev-0002")


def test_assigned_devices_choose_on_a_share():
    """By its training samples the third device takes the wrong model, by its validation samples the right one."""
    found = evaluated("assigned")
    assert found.models.tolist() == [SAYS_0, SAYS_1, SAYS_0]
    assert found.correct.tolist() == [3, 2, 0]
    assert found.accuracy == pytest.approx(100 * 5 / 7)
    assert found.median == 75
    assert found.loss == pytest.approx((5 * RIGHT + 2 * WRONG) / 7)
    final = final_round()
    checked = dataclasses.replace(final.assignments["dev-0002"], share=Share.VALIDATION)
    final = dataclasses.replace(final, assignments={**final.assignments, "dev-0002": checked})
    found = evaluated("assigned", final, validation=(Shard.none(), Shard.none(), labelled(1)))
    assert found.models.tolist() == [SAYS_0, SAYS_1, SAYS_1]


def test_single_candidate_is_taken_anyway():
    """A device with one candidate takes it at any loss."""
    found = evaluated("assigned", final_round((SAYS_1,), (SAYS_0,), (SAYS_1,)))
    assert found.models.tolist() == [SAYS_1, SAYS_0, SAYS_1]
    assert found.correct.tolist() == [1, 0, 1]


def test_untested_devices_are_left_out():
    """Devices without tests or assignments are left out."""
    tests = (Shard.none(), *TEST[1:])
    assert evaluated("argmin", test=tests).names == evaluated("assigned", test=tests).names == ("dev-0001", "dev-0002")
    found = evaluated("assigned", final_round(names=("dev-0002", "dev-0000")))
    assert found.names == ("dev-0000", "dev-0002")
    assert found.tested.tolist() == [4, 1]


def test_probes_replace_tests_under_argmin():
    """Probes replace the devices tests under argmin only."""
    probes = (labelled(1, 1, 1), labelled(0))
    found = evaluated("argmin", probes=probes)
    assert (found.models.tolist(), found.tested.tolist(), found.names) == ([SAYS_1, SAYS_0], [3, 1], ())
    assert evaluated("assigned", probes=probes).tested.tolist() == [4, 2, 1]


@pytest.mark.parametrize("protocol", ["argmin", "assigned"])
def test_no_test_samples_no_accuracy(protocol):
    """Nothing is not zero percent."""
    assert evaluated(protocol, test=()) is None
    assert evaluated("assigned", final_round(names=())) is None
