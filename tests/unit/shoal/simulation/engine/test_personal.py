"""The personal finish in the simulator: that of a device, with the simulator's networks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edge_client.learning.data import Dataset, DataSplits
from edge_client.learning.finish import Ended, finish
from edge_client.learning.model import OrtModel
from shoal.owner.task_compiler.builtin import build
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine import personal
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.simulate import sim_plan
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import origins
from tests.helpers.simulations import NETWORK, population

pytestmark = pytest.mark.torch
MINI = LocalTraining(epochs=2, batch_size=5, lr=0.3)


def workforce(data=None, local=MINI):
    run = sim_plan("fedavg", {}, NETWORK, sim_options(rounds=4, local=local))
    return Workforce(data or population().of(range(4)), NETWORK, run, origins(NETWORK, 1, 0))


def easy():
    """Return data whose validation and test shares are the training share, so that training always helps."""
    train = population().train[:4]
    return Population(train, train, train)


def start(count=4):
    return np.repeat(origins(NETWORK, 1, 0), count, axis=0)


def test_simulated_finish_is_a_devices(compile_once):
    """Few validation samples, and enough of them: the same candidates, losses to rounding, choices and models."""
    bundle = compile_once(*build("mlp", inputs=8, hidden=6, classes=4)[:3], name="small", kind="classification")
    enough = easy()
    data = Population(enough.train, (*population().validation[:2], *enough.validation[2:]), enough.test)
    work, fresh = workforce(data), personal.drawn_start(NETWORK, start(1)[0], 3)
    found = personal.chosen(work, start(), 4, fresh)
    for i in range(4):
        told = Ended(plan=work.run, device=data.names[i], round=4, own=start(1)[0], above={}, fresh=lambda: fresh)
        done = finish(told, shares_of(data, i), OrtModel(bundle), lambda: False)
        assert list(found[i].losses) == list(done.losses) == ["cluster", "1", "3", "10", "alone"]
        np.testing.assert_allclose(list(found[i].losses.values()), list(done.losses.values()), rtol=1e-3)
        assert (found[i].choice, found[i].samples) == (done.choice, done.samples)
        np.testing.assert_allclose(found[i].theta, done.theta, atol=1e-3)


def test_no_test_samples_no_figures():
    data = population().of([0, 1])
    bare = Population(data.train, data.validation, (Shard.none(), *data.test[1:]))
    found = personal.measure(workforce(bare), start(2))
    assert np.isnan(found.losses[0])
    assert (found.tested[0], found.tested[1]) == (0, 15)


def test_the_batches_follow_from_the_round():
    quick = dataclasses.replace(MINI, epochs=1, batch_size=10)
    first, again, other = (personal.finish(workforce(local=quick), start(), round_).losses for round_ in (4, 4, 9))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_drawn_start_is_one_model():
    drawn = personal.drawn_start(NETWORK, start(1)[0], 3)
    assert drawn.shape == (NETWORK.length,)
    assert not np.array_equal(drawn, start(1)[0])


def shares_of(data, i):
    return DataSplits(*(Dataset(share[i].x, share[i].y) for share in (data.train, data.validation, data.test)))


def test_devices_do_better_with_their_choice():
    """Devices do better with the models that they choose."""
    work = workforce(easy())
    plain = personal.measure(work, start())
    found = personal.finish(work, start(), 4)
    assert found.choices == ("10",) * 4
    assert (found.correct / found.tested).mean() > (plain.correct / plain.tested).mean() + 0.2
    assert plain.choices == ("cluster",) * 4
    settled = personal.chosen(work, start(), 4)[0].theta
    alone = personal.finish(work, start(), 4, settled)
    assert alone.choices[0] == "alone"


def test_no_validation_keeps_clusters_model():
    """A device without validation samples keeps its clusters model."""
    data = population().of([0, 1])
    bare = dataclasses.replace(data, validation=(Shard.none(), *data.validation[1:]))
    assert personal.finish(workforce(bare), start(2), 4).choices[0] == "cluster"


def test_other_models_are_candidates():
    """Models above and dittos are candidates."""
    above = [{"node-2": each.theta} for each in personal.chosen(workforce(easy()), start(), 4)]
    found = personal.chosen(workforce(easy()), start(), 4, above=above, weight=0.5)
    assert list(found[0].losses) == ["cluster", "1", "3", "10", "node-2", "ditto"]
    taken = personal.finish(workforce(easy(), LocalTraining(epochs=1, batch_size=5, lr=1e-4)), start(), 4, above=above)
    assert taken.choices == ("node-2",) * 4
