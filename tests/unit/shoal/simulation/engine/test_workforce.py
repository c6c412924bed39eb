"""Simulated devices that carry out a round: masks, sums of updates, orders and shares."""

import dataclasses
import re

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel, RoundPlan, mean_update
from aggregator.strategies.registry import make_strategy
from shoal.errors import DataError, IntegrityError
from shoal.protocol.messages import Assignment, Phase, Share
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine import workforce
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.simulate import sim_plan
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import Softmax, origins
from tests.helpers.plans import altered
from tests.helpers.simulations import FULL, NETWORK, population

pytestmark = pytest.mark.torch


def test_strategies_see_masked_vectors_only():
    """The workforce returns the masked update, for single updates and for deferred means."""
    run_ = sim_plan("ifca", {"k": "2"}, NETWORK, sim_options(rounds=3, local=FULL, mode="permutation"))
    start = origins(NETWORK, 2, 0)
    masked = Workforce(population(), NETWORK, run_, start, deferred=False)
    clear = Workforce(population(), NETWORK, altered(run_, mode="none"), start, deferred=False)
    late = Workforce(population(), NETWORK, run_, start, deferred=True)
    strategy = make_strategy(run_)
    _, plan = strategy.plan(strategy.init(masked.population.names), 1, masked.population.names)
    ours, theirs, summed = masked.carry_out(plan), clear.carry_out(plan), late.carry_out(plan)
    key = masked.models.mask
    for a, b in zip(ours, theirs, strict=True):
        out = np.empty_like(b.vector)
        key.apply(b.vector, out)
        np.testing.assert_array_equal(a.vector, out)
        assert not np.array_equal(a.vector, b.vector)
    assert all(c.vector is None for c in summed)
    for weighting in ("uniform", "samples"):
        np.testing.assert_allclose(late.average(summed, weighting), mean_update(ours, weighting), atol=1e-6)
        groups = {c.model for c in ours}
        for model in groups:
            mine = [[c for c in given if c.model == model] for given in (summed, ours)]
            np.testing.assert_allclose(late.average(mine[0], weighting), mean_update(mine[1], weighting), atol=1e-6)
        np.testing.assert_allclose(late.average(summed[1:4], weighting), mean_update(ours[1:4], weighting), atol=1e-6)
    for uneven in (summed, ours):
        uneven[0] = dataclasses.replace(uneven[0], samples=1000 * uneven[0].samples)
    late.samples = np.array([c.samples for c in summed])
    late._equal = False
    np.testing.assert_allclose(late.average(summed, "samples", 3.0), mean_update(ours, "samples", 3.0), atol=1e-6)
    old = [dataclasses.replace(c, round=9) for c in summed]
    with pytest.raises(IntegrityError, match="never kept"):
        late.average(old, "uniform")


ONE = Softmax(1, 2)
"""theta: two weights, two biases."""
ORIGINS = np.array([[1, 2, 3, 4], [0, 0, 0, 2]], np.float32)


def labelled(*labels):
    return Shard(np.ones((len(labels), 1), np.float32), np.array(labels, np.int64))


SMALL = Population((labelled(0, 0), labelled(1), labelled(0)), test=(labelled(0, 1), labelled(1), labelled(1)))
"""Three devices; model 1 answers 1 to all, with logits 0 and 2."""


def force(
    algorithm="ifca", *, population=SMALL, mask="none", segments=(), origins=ORIGINS, settings=None, cap=0.0, **options
):
    if settings is None:
        settings = {"k": str(len(origins))} if algorithm == "ifca" else {}
    run = sim_plan(
        algorithm,
        settings,
        ONE,
        sim_options(rounds=3, local=FULL, mode=mask, segments=segments, weight_cap=cap),
    )
    return Workforce(population, ONE, run, origins[: run.origins], **options)


def order(*candidates, train=True, **changes):
    made = Assignment(Phase.TRAIN, candidates, Share.TRAIN, train=train, evaluate=False, margins=False)
    return dataclasses.replace(made, **changes)


def plan_of(models=None, **orders):
    names = {"a": "dev-0000", "b": "dev-0001", "c": "dev-0002"}
    models = models or {4: ClusterModel(origin=0), 6: ClusterModel(origin=1)}
    return RoundPlan(1, models, {names[k]: o for k, o in orders.items()})


def test_unfit_origins_are_refused():
    """Origins of another number or length are refused."""
    run = sim_plan("ifca", {"k": "2"}, ONE, sim_options(rounds=3, local=FULL))
    for shape in ((1, 4), (2, 5)):
        message = f"origins of shape ({shape[0]}, {shape[1]}) for 2 models of 4 coordinates"
        with pytest.raises(DataError, match=re.escape(message)):
            Workforce(SMALL, ONE, run, np.zeros(shape, np.float32))


def test_model_is_a_weighted_sum():
    """And the origins are left alone."""
    made = force(mask="permutation")
    plan = plan_of({0: ClusterModel(0, scale=0.5, others=((2.0, 1),)), 1: ClusterModel(1)})
    assert made.theta(plan, 0).tolist() == [0.5, 1, 1.5, 6]
    assert made.theta(plan, 1).tolist() == [0, 0, 0, 2]
    assert ORIGINS.tolist() == [[1, 2, 3, 4], [0, 0, 0, 2]]


def test_shared_segment_has_its_own_state():
    """A shared segment is taken from its own state."""
    made = force(segments=(("shared", 2), ("cluster", 2)))
    plan = dataclasses.replace(plan_of({1: ClusterModel(1)}), shared=ClusterModel(0))
    assert made.theta(plan, 1).tolist() == [1, 2, 0, 2]


def test_uploads_are_in_order_of_names():
    """And of the ordered devices only. A loss is the mean over all steps, which is lower than that of the first model."""
    found = force().carry_out(plan_of(c=order(4), a=order(6)))
    assert [(c.device, c.model, c.samples) for c in found] == [("dev-0000", 6, 2), ("dev-0002", 4, 1)]
    assert 0.1 < found[0].loss < np.log(1 + np.exp(2)) - 0.1


def test_best_of_several_is_trained():
    """Logits of model 4 at x = 1 are 4 and 6, of model 6 0 and 2: equal losses, so the first one is taken."""
    plan = plan_of(
        {4: ClusterModel(0), 6: ClusterModel(1), 8: ClusterModel(2)},
        a=order(6, 8, margins=True),
        b=order(4, 6),
    )
    third = ORIGINS[1] + np.array([0, 0, 5, 0], np.float32)
    first, second = force(origins=np.stack([*ORIGINS, third]), deferred=False).carry_out(plan)
    assert (first.model, second.model) == (8, 4)
    assert first.loss == pytest.approx(np.log(1 + np.exp(-3)), abs=5e-5)
    assert second.loss == pytest.approx(np.log(1 + np.exp(-2)), abs=5e-5)
    assert first.margins == (0.0, pytest.approx(np.log(1 + np.exp(-3)) - np.log(1 + np.exp(2)), abs=5e-3))
    assert second.margins == ()
    assert np.abs(first.vector).max() > 0


def test_no_training_a_loss_and_no_update():
    """Without training there is a loss and no update."""
    plan = plan_of(a=order(6, train=False), b=order(6, train=False, evaluate=True))
    first, second = force().carry_out(plan)
    assert first.loss == pytest.approx(np.log(1 + np.exp(2)), abs=5e-5)
    assert (first.vector, first.norm, first.correct, first.tested) == (None, 0.0, 0, 0)
    assert (second.correct, second.tested) == (1, 1)


def test_norms_are_in_clear():
    """Norms are of the update and of the trained model in clear."""
    made = force(mask="permutation", deferred=False)
    (found,) = made.carry_out(plan_of(a=order(4, norm=True)))
    (clear,) = force(deferred=False).carry_out(plan_of(a=order(4)))
    assert found.norm == pytest.approx(np.linalg.norm(clear.vector))
    assert found.model_norm == pytest.approx(np.linalg.norm(ORIGINS[0] + clear.vector), abs=5e-5)
    assert clear.model_norm == 0


@pytest.mark.parametrize("deferred", [False, True])
def test_nearest_compared_model_is_reported(deferred):
    """Measured in clear; at a tie it is the model that was trained."""
    (clear,) = force(deferred=False).carry_out(plan_of(a=order(4)))
    made = force(mask="permutation", deferred=deferred, origins=np.stack([*ORIGINS, ORIGINS[0] + clear.vector]))
    models = {4: ClusterModel(0), 5: ClusterModel(0), 6: ClusterModel(1), 7: ClusterModel(2)}
    plan = plan_of(models, a=order(4, compare=(4, 5, 6, 7)), b=order(5, compare=(4, 5)), c=order(6))
    assert [c.nearest for c in made.carry_out(plan)] == [7, 5, 0]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("mask", ["none", "rotation"])
def test_placed_device_reports_a_direction(mask, deferred):
    """A device to be placed trains and reports a direction alone."""
    (clear,) = force(deferred=False).carry_out(plan_of(a=order(4, phase=Phase.PRETRAIN)))
    ends = [ORIGINS[0] + share * clear.vector for share in (-0.1, 9)]
    made = force(mask=mask, deferred=deferred, origins=np.stack([*ORIGINS, *ends]))
    models = {m: ClusterModel(i) for i, m in enumerate((4, 5, 6, 7))}
    place = order(4, phase=Phase.PLACE, train=False, compare=(5, 6, 7))
    (found,) = made.carry_out(plan_of(models, a=place))
    assert (found.phase, found.nearest, found.vector, found.norm) == (Phase.PLACE, 7, None, 0.0)
    assert found.loss == clear.loss


EQUAL = Population((labelled(0), labelled(1), labelled(0)))
"""Three devices of one sample each."""


@pytest.mark.parametrize(
    ("algorithm", "population", "cap", "room", "summed"),
    [
        ("fedavg", SMALL, 0.0, 1 << 20, True),
        ("fedavg", EQUAL, 2.0, 1 << 20, True),
        ("fedavg", SMALL, 2.0, 1 << 20, False),
        ("fedavg", SMALL, 2.0, 0, True),
        ("cfl", SMALL, 0.0, 0, False),
    ],
    ids=["no cap", "equal devices", "room for single updates", "no room", "compares updates"],
)
def test_updates_are_summed_if_that_suffices(monkeypatch, algorithm, population, cap, room, summed):
    """Weights that a cap may change are known when all have trained; a device would then be trained twice."""
    monkeypatch.setattr(workforce, "ROWS_BYTES", room)
    (found,) = force(algorithm, population=population, cap=cap).carry_out(plan_of({0: ClusterModel(0)}, a=order(0)))
    assert (found.vector is None) is summed


@pytest.mark.parametrize(
    ("algorithm", "settings", "asked", "known"),
    [
        ("ifca", {"k": "2"}, False, False),
        ("ifca", {"k": "2"}, True, True),
        ("fedavg", {}, False, False),
        ("fedavg", {"discrepancy": "on"}, False, True),
    ],
)
def test_norms_of_sums_are_computed_if_read(algorithm, settings, asked, known):
    """Norms of summed updates are computed if the strategy or the caller reads them."""
    plan = plan_of({0: ClusterModel(0)}, a=order(0))
    (stored,) = force(algorithm, settings=settings, deferred=False).carry_out(plan)
    (found,) = force(algorithm, settings=settings, deferred=True, norms=asked).carry_out(plan)
    assert found.norm == pytest.approx(stored.norm if known else 0.0, rel=1e-5)


def test_missing_samples_name_the_share():
    """An order to score samples that are missing names the share."""
    with pytest.raises(DataError, match="a simulated device has no validation samples"):
        force().carry_out(plan_of(a=order(4, 6, share=Share.VALIDATION)))


def test_data_may_change_between_rounds():
    """Devices train on the later data, and report its numbers of samples."""
    run_ = sim_plan("fedavg", {}, NETWORK, sim_options(rounds=3, local=FULL))
    strategy = make_strategy(run_)
    later = population(uneven=False, seed=1)
    names = later.names
    _, plan = strategy.plan(strategy.init(names), 1, names)
    changed = Workforce(population(), NETWORK, run_, origins(NETWORK, 1, 0))
    first = changed.carry_out(plan)
    changed.use_data(later)
    ours = changed.carry_out(plan)
    fresh = Workforce(later, NETWORK, run_, origins(NETWORK, 1, 0)).carry_out(plan)
    assert [c.samples for c in ours] == [20] * 10 != [c.samples for c in first]
    for a, b in zip(ours, fresh, strict=True):
        np.testing.assert_array_equal(a.vector, b.vector)
