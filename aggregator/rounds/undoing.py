"""A step that devices have refused is undone: its model goes on from the state before, which they still hold.

In a run with a keeper devices refuse a mean that is no sum of updates, such as one of a cell in which a device sent a wrong code.
They decline the next round with reason SUM, and it closes empty. `refused_models` says whose mean that was, and `undone` takes
the recipe back.

Example: the mean of model 2 in round 6 is refused by all nine devices in round 7. In round 8 they train its state of round 5.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from aggregator.rounds.held_models import HeldModels, KeptStep
from aggregator.strategies.base import ClientUpdate
from shoal.limits import LEAST_CELL
from shoal.protocol.states import StateId


def refused_models(disputed: Mapping[str, int], accepted: Iterable[ClientUpdate]) -> frozenset[int]:
    """Return the models whose last mean at least three devices have refused, and more than have trained from it.

    Args:
        disputed: device -> the model whose mean it has refused in this round.
        accepted: the updates of the round.
    """
    trained = Counter(update.model for update in accepted if update.vector is not None)
    refused = Counter(disputed.values())
    return frozenset(model for model, count in refused.items() if count >= max(LEAST_CELL, 1 + trained[model]))


def undone(held: HeldModels, models: Collection[int]) -> HeldModels:
    """Return the models without the last step of ``models``, as far as that began from one state.

    Args:
        held: after the round in which devices have refused their means.
        models: of `refused_models`.
    """
    back: dict[StateId, StateId] = {}
    current = frozenset(held.states.names.values())
    for kept in held.steps if models else ():
        for recipe in kept.step.recipes:
            if recipe.model in models and recipe.state in current and [t.weight for t in recipe.terms] == [1.0]:
                back[recipe.state] = recipe.terms[0].state
    if not back:
        return held
    steps = (_without(kept, back) for kept in held.steps)
    names = {number: back.get(state, state) for number, state in held.states.names.items()}
    states = dataclasses.replace(held.states, names=names)
    return dataclasses.replace(held, states=states, steps=tuple(kept for kept in steps if kept.step.recipes))


def _without(kept: KeptStep, back: Mapping[StateId, StateId]) -> KeptStep:
    recipes = tuple(recipe for recipe in kept.step.recipes if recipe.state not in back)
    left = {recipe.model for recipe in recipes}
    open_ = tuple(sorted({back.get(state, state) for state in kept.step.open}))
    means = tuple(mean for mean in kept.means if mean.model in left)
    return KeptStep(dataclasses.replace(kept.step, recipes=recipes, open=open_), means)
