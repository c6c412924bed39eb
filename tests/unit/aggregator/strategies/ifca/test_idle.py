"""Models that too few devices choose: retired if k was found, refilled if the owner gave it."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.ifca.strategy import IDLE_ROUNDS
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = tuple(f"dev-{i:02d}" for i in range(12))
RNG = np.random.default_rng(9)
VECTORS = {d: RNG.standard_normal(D).astype(np.float32) for d in DEVICES}
LOSSES = {d: float(i) for i, d in enumerate(DEVICES)}


def all_but(empty):
    """Return answers of devices that choose models by their place, but none of those in ``empty``."""

    def give(device, assignment, round_):
        models = [m for m in assignment.candidates if m not in empty]
        model = models[DEVICES.index(device) % len(models)]
        return contribution(device, VECTORS[device], round=round_, model=model, loss=LOSSES[device])

    return give


def given_k(**changes):
    return Rounds(run_plan("ifca", {"k": 3}, origins=3, **{"min_contributors": 3, **changes}), DEVICES)


def test_given_k_begins_again_from_the_worst():
    """A model of a given k begins again from the devices that fit worst."""
    rounds = given_k()
    for _ in range(IDLE_ROUNDS):
        before = rounds.state.slots
        assert [e.kind for e in rounds.events] == []
        rounds.step(all_but({2}))
    (event,) = rounds.events
    # Odd devices chose model 1, and their losses are larger on average: its worst three devices are the last ones.
    assert (event.kind, dict(event.detail)) == ("model-refilled", {"model": 2, "from": 1, "devices": 3})
    worst = np.mean([VECTORS[d] for d in ("dev-07", "dev-09", "dev-11")], axis=0)
    step = rounds.theta(rounds.state.slots[2]) - 2 * np.mean([VECTORS[d] for d in DEVICES[1::2]], axis=0)
    np.testing.assert_allclose(step, worst, rtol=1e-4, atol=1e-5)
    assert before[2].version == 0
    assert (rounds.state.slots[2].version, rounds.state.idle) == (IDLE_ROUNDS, {})


@pytest.mark.parametrize("lie", [-3.4e38, 3.4e38])
def test_one_false_loss_chooses_no_cluster(lie):
    """One false loss does not choose the cluster that fits worst."""
    rounds, answers = given_k(), all_but({2})

    def tell(device, assignment, round_):
        at = DEVICES.index(device)
        told = lie if at == (0 if lie > 0 else 11) else 10.0 * (at % 2) + at
        return dataclasses.replace(answers(device, assignment, round_), loss=told)

    rounds.go(tell, IDLE_ROUNDS)
    assert rounds.events[0].detail["from"] == 1


@pytest.mark.parametrize(
    ("least", "empty", "version"),
    [(1, {2}, 0), (3, set(), 6), (4, {2}, 0)],
    ids=["means of one, as in the paper", "enough choose it", "no cluster can spare devices"],
)
def test_models_that_are_not_refilled(least, empty, version):
    rounds = given_k(min_contributors=least).after(all_but(empty), 6)
    assert (rounds.events, rounds.state.slots[2].version) == ([], version)


def test_nothing_counts_before_all_chose():
    """Nothing is counted before all devices have chosen."""
    rounds = given_k().after(all_but({2}), 6, present=DEVICES[:9])
    assert rounds.state.idle == {}


def found(**changes):
    """Return rounds of IFCA that has found three models."""
    rounds = Rounds(run_plan("ifca", {}, **{"min_contributors": 3, **changes}), DEVICES).after(all_but(set()))
    models = [rounds.state.search.one] * 3
    clusters = {d: i % 3 for i, d in enumerate(DEVICES)}
    rounds.state = dataclasses.replace(rounds.state, slots=tuple(models), choice=clusters, search=None)
    rounds.events.clear()
    return rounds


def test_model_of_found_k_is_offered_no_more():
    rounds = found().after(all_but({1}), IDLE_ROUNDS)
    (event,) = rounds.events
    assert (event.kind, dict(event.detail)) == ("model-retired", {"model": 1, "devices": 0, "rounds": IDLE_ROUNDS})
    rounds.reload()
    rounds.step(all_but(set()))
    assert {o.candidates for o in rounds.plan.assignments.values()} == {(0, 2)}
    final = rounds.strategy.final(rounds.state, 20, DEVICES)
    assert {o.candidates for o in final.assignments.values()} == {(0, 2)}
    assert set(final.models) == {0, 2}


def test_retired_models_devices_choose_again():
    """Devices of a retired model choose again."""
    rounds = found()

    def two_choose_it(device, assignment, round_):
        given = all_but({1})(device, assignment, round_)
        if device in DEVICES[:2] and 1 in assignment.candidates:
            return contribution(device, VECTORS[device], round=round_, model=1)
        return given

    rounds.go(two_choose_it, IDLE_ROUNDS)
    assert rounds.events[-1].detail["devices"] == 2
    assert rounds.state.choice.keys() == set(DEVICES[2:])
    rounds.step(two_choose_it)
    assert set(rounds.state.choice.values()) == {0, 2}


def test_one_model_always_stays():
    rounds = found(min_contributors=1).after(all_but({1, 2}), IDLE_ROUNDS + 2)
    assert rounds.state.retired == {1, 2}
    for _ in range(IDLE_ROUNDS + 2):
        rounds.step(all_but(set()))
    assert rounds.state.retired == {1, 2}
