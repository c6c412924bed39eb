"""The personal finish: a device leaves its cluster's model only for one that its validation share clearly prefers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from edge_client.learning.personal import one_epoch
from shoal.protocol.messages import Share
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine import personal
from shoal.simulation.engine.personal import Alone
from shoal.simulation.engine.simulate import SimOptions, sim_plan
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import origins
from shoal.task.manifest import LocalTraining
from tests.helpers.simulations import NETWORK, population

pytestmark = pytest.mark.torch
MINI = LocalTraining(epochs=2, batch_size=5, lr=0.3)


def workforce(data=None, local=MINI, trainer="auto"):
    run = sim_plan("fedavg", {}, NETWORK, SimOptions(rounds=3, local=local))
    return Workforce(data or population(), NETWORK, run, origins(NETWORK, 1, 0), trainer=trainer)


def easy():
    """Return data whose validation and test shares are the training share, so that training always helps."""
    train = population().train
    return Population(train, train, train)


def trained(work, epochs=40):
    """Return models that devices train from the start: shape (devices, d)."""
    thetas = torch.from_numpy(start())
    training = personal._Training(work, work.shelf(Share.TRAIN), work.trainer, work.population.names)
    for round_ in range(epochs):
        training.train(thetas, 100 + round_, one_epoch(MINI.settings()))
    return thetas.numpy()


def alone(thetas):
    return Alone(thetas, lambda places: thetas[places])


def start(count=10):
    return np.repeat(origins(NETWORK, 1, 0), count, axis=0)


def test_an_untrained_cluster_model_is_left_for_ten_epochs_on_top():
    found = personal.finish(workforce(easy()), start(), 4)
    plain = personal.measure(workforce(easy()), start())
    assert found.choices == ("10",) * 10
    assert (found.correct / found.tested).mean() > (plain.correct / plain.tested).mean() + 0.2
    assert plain.choices == ("cluster",) * 10


def test_a_model_trained_alone_is_taken_if_it_is_the_best():
    work = workforce(easy())
    found = personal.finish(work, start(), 4, alone(trained(work)))
    assert found.choices == ("alone",) * 10


@pytest.mark.parametrize("trainer", ["auto", "dual"])
def test_a_chosen_model_is_trained_again_with_the_validation_samples(monkeypatch, trainer):
    """Devices that choose the model trained alone get the one that `Alone.again` trains for them, others train on their own.

    Trainers keep kernels of the training samples by the places of devices; they must not be taken for other samples.
    """
    wanted = ["cluster"] * 3 + ["alone"] * 3 + ["10"] * 4
    picks = iter(wanted)
    monkeypatch.setattr(personal, "choose", lambda _, **__: next(picks))
    asked = []

    def again(places):
        asked.append(places.tolist())
        return np.full((len(places), NETWORK.length), 0.5, np.float32)

    work = workforce(population(), trainer=trainer)
    models, choices = personal.chosen_models(work, start(), 4, Alone(start() + np.float32(1), again))
    assert (asked, choices) == ([[3, 4, 5]], tuple(wanted))
    assert (models[3:6] == 0.5).all()
    np.testing.assert_array_equal(models[:3], start(3))
    more = workforce(population().with_validation(), trainer="loop")
    expected = personal.candidates(more, start(), 4)
    for i in range(6, 10):
        np.testing.assert_allclose(models[i], expected[i]["10"].numpy(), atol=1e-5)
    assert not np.allclose(models[6], personal.candidates(work, start(), 4)[6]["10"].numpy(), atol=1e-4)


def test_a_second_training_that_spoils_the_model_leaves_the_first():
    work = workforce(easy())
    first = trained(work)
    spoilt = Alone(first, lambda places: -first[places])
    models, choices = personal.chosen_models(work, start(), 4, spoilt)
    assert choices == ("alone",) * 10
    np.testing.assert_array_equal(models, first)


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
    found = personal.candidates(workforce(), start(), 4, alone(start()), above=above, weight=0.5)
    assert [list(each) for each in found] == [["cluster", "1", "3", "10", "node-0", "ditto", "alone"]] * 10


def test_a_strong_pull_keeps_dittos_model_near_the_clusters():
    def distance(weight):
        (found, *_) = personal.candidates(workforce(), start(), 4, weight=weight)
        return float((found["ditto"] - found["cluster"]).norm())

    assert distance(2.0) < 0.7 * distance(0.1)


def test_a_model_above_is_taken_if_it_is_the_best():
    work = workforce(easy())
    above = [{"node-2": theta} for theta in trained(work)]
    assert personal.finish(work, start(), 4, above=above).choices == ("node-2",) * 10


def test_the_drawn_start_is_one_model_of_the_networks_length():
    drawn = personal.drawn_start(NETWORK, start(1)[0], 3)
    assert drawn.shape == (1, NETWORK.length)
    assert not np.array_equal(drawn, start(1))
