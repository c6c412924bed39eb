"""The personal finish: a device leaves its cluster's model only for one that its validation share clearly prefers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from edge_client.learning.personal import one_epoch
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine import personal
from shoal.simulation.engine.simulate import SimOptions, sim_plan
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import origins
from shoal.task.manifest import LocalTraining
from tests.helpers.simulations import NETWORK, population

pytestmark = pytest.mark.torch
MINI = LocalTraining(epochs=2, batch_size=5, lr=0.3)


def workforce(data=None, local=MINI):
    run = sim_plan("fedavg", {}, NETWORK, SimOptions(rounds=3, local=local))
    return Workforce(data or population(), NETWORK, run, origins(NETWORK, 1, 0))


def easy():
    """Return data whose validation and test shares are the training share, so that training always helps."""
    train = population().train
    return Population(train, train, train)


def start(count=10):
    return np.repeat(origins(NETWORK, 1, 0), count, axis=0)


def test_an_untrained_cluster_model_is_left_for_ten_epochs_on_top():
    found = personal.finish(workforce(easy()), start(), 4)
    plain = personal.measure(workforce(easy()), start())
    assert found.choices == ("10",) * 10
    assert (found.correct / found.tested).mean() > (plain.correct / plain.tested).mean() + 0.2
    assert plain.choices == ("cluster",) * 10


def test_a_model_trained_alone_is_taken_if_it_is_the_best():
    trained = start()
    work = workforce(easy())
    for round_ in range(40):
        personal._train(work, torch.from_numpy(trained), 100 + round_, one_epoch(MINI.settings()))
    found = personal.finish(work, start(), 4, trained)
    assert found.choices == ("alone",) * 10


def test_a_device_without_validation_samples_keeps_its_clusters_model():
    data = population()
    bare = dataclasses.replace(data, validation=(Shard.none(), *data.validation[1:]))
    assert personal.finish(workforce(bare), start(), 4).choices[0] == "cluster"


def test_a_device_without_test_samples_has_no_figures():
    data = population()
    bare = Population(data.train, data.validation, (Shard.none(), *data.test[1:]))
    found = personal.measure(workforce(bare), start())
    assert np.isnan(found.losses[0])
    assert (found.tested[0], found.tested[1]) == (0, 15)


def test_the_batches_follow_from_the_round():
    first, again, other = (personal.finish(workforce(), start(), round_).losses for round_ in (4, 4, 9))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_candidates_come_in_the_order_of_a_device():
    above = [{"node-0": start(1)[0]}] * 10
    found = personal.candidates(workforce(), start(), 4, start(), above=above, weight=0.5)
    assert [list(each) for each in found] == [["cluster", "1", "3", "10", "node-0", "ditto", "alone"]] * 10


def test_a_strong_pull_keeps_dittos_model_near_the_clusters():
    def distance(weight):
        (found, *_) = personal.candidates(workforce(), start(), 4, weight=weight)
        return float((found["ditto"] - found["cluster"]).norm())

    assert distance(2.0) < 0.7 * distance(0.1)


def test_a_model_above_is_taken_if_it_is_the_best():
    work = workforce(easy())
    trained = torch.from_numpy(start())
    for round_ in range(40):
        personal._train(work, trained, 100 + round_, one_epoch(MINI.settings()))
    above = [{"node-2": theta.numpy()} for theta in trained]
    assert personal.finish(work, start(), 4, above=above).choices == ("node-2",) * 10


def test_the_drawn_start_is_one_model_of_the_networks_length():
    drawn = personal.drawn_start(NETWORK, start(1)[0], 3)
    assert drawn.shape == (1, NETWORK.length)
    assert not np.array_equal(drawn, start(1))
