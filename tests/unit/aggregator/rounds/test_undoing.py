"""A refused step is undone: its model goes back by one state, the others stay."""

from __future__ import annotations

import dataclasses

from aggregator.rounds.held_models import HeldModels, KeptMean, KeptStep
from aggregator.rounds.relay import States
from aggregator.rounds.undoing import refused_models, undone
from shoal.protocol.states import StateId, StateRecipe, Step, Term
from tests.helpers.plans import contribution, run_plan

OLD, NEW = [StateId(0, 4), StateId(1, 4)], [StateId(0, 5), StateId(1, 5)]


def held_after(terms=1):
    """Return the models after round 5, which has moved two of them."""
    recipes = tuple(
        StateRecipe(old.model, 5, tuple(Term(old.model, 4, 1 / terms) for _ in range(terms)), 1.0) for old in OLD
    )
    means = tuple(KeptMean(model, 3, bytes(16), None) for model in (0, 1))
    held = HeldModels.begin(run_plan(), ["dev-1"], 1)
    step = KeptStep(Step(5, recipes, tuple(NEW), 1.0), means)
    return dataclasses.replace(held, states=States({7: NEW[0], 8: NEW[1]}, 9), steps=(step,), closed=5)


def test_one_model_goes_back():
    found = undone(held_after(), {1})
    assert found.states.names == {7: NEW[0], 8: OLD[1]}
    (kept,) = found.steps
    assert [recipe.model for recipe in kept.step.recipes] == [mean.model for mean in kept.means] == [0]
    assert kept.step.open == (NEW[0], OLD[1])
    found = undone(held_after(), {0, 1})
    assert found.steps == (), "a step without recipes is gone"
    assert set(found.states.names.values()) == set(OLD)


def test_nothing_else_is_undone():
    held = held_after()
    assert undone(held, ()) is held
    assert undone(held, {5}) is held
    mixed = held_after(terms=2)
    assert undone(mixed, {0}) is mixed


def test_three_must_refuse_and_more_than_use():
    refused = {f"dev-{at}": 1 for at in range(3)}
    assert refused_models(refused, []) == {1}
    assert refused_models(dict(list(refused.items())[:2]), []) == frozenset()
    used = [contribution(f"dev-{at}", [1.0] * 6, model=1) for at in range(5, 8)]
    assert refused_models(refused, used) == frozenset()
    assert refused_models(refused, used[:2]) == {1}
