"""Recipes of a round: how the models that a strategy has moved follow from states that devices hold.

The aggregator keeps no model (docs/adr/0025-round-keys.md). A strategy works as it always does: between
rounds each of its models starts from a *state* and has no offset. While it closes a round, models get offsets: masked means
of that round. `settle` then

1. gives each model that changed a new state, (model id, round), and the step that leads to it: the states that it is the
   weighted sum of, and the mean that devices add;
2. returns the strategy's state with all models at their new states, so that no masked vector outlives the round.

The number of a state is its place in `States`. The sealed origins of the run come first, with their own numbers, as
``ClusterModel.origin`` has them from the beginning.

Example: a model that moved in round 1 becomes state 1 of a run with one origin.

    >>> import numpy as np
    >>> from aggregator.rounds.relay import States, settle
    >>> from aggregator.strategies.base import ClusterModel
    >>> moved = ClusterModel().moved(np.ones(2, np.float32), 3, 1)
    >>> settled, states, (step,) = settle((moved,), {0: moved}, States.of_origins(1), 1)
    >>> settled[0].origin, settled[0].offset, states[1], step.terms
    (1, None, StateId(model=0, round=1), ((1.0, StateId(model=0, round=0)),))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from aggregator.strategies.base import ClusterModel, starts_of
from shoal.errors import IntegrityError
from shoal.protocol.states import StateId
from shoal.types import Float32Vector

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class RelayedStep:
    """The last step to a state: devices sum up ``terms`` in their order and add ``mean``.

    Attributes:
        state: the new state.
        terms: (weight, earlier state), at least one.
        mean: (d,) or the length of the model's segment, float32, masked under the round's key; None if the state is a sum of
            others alone.
        contributors: fewest devices in any part of the mean; 0 without one.
    """

    state: StateId
    terms: tuple[tuple[float, StateId], ...]
    mean: Float32Vector | None
    contributors: int


@dataclass(frozen=True, slots=True)
class States:
    """The states that devices may hold, by number.

    Attributes:
        names: number -> state, of all states that a model of the run may still start from.
        next: the next free number.
    """

    names: Mapping[int, StateId]
    next: int

    @classmethod
    def of_origins(cls, count: int) -> States:
        """Return the states before round 1: the run's ``count`` sealed origins."""
        return cls({number: StateId(number, 0) for number in range(count)}, count)

    def __getitem__(self, number: int) -> StateId:
        """Return the state with this number.

        Raises:
            IntegrityError: no model starts from it any more.
        """
        if number not in self.names:
            raise IntegrityError(f"state {number} of the run is not known")
        return self.names[number]

    def only(self, used: frozenset[int], origins: int) -> States:
        """Return the states without those that no model uses; the first ``origins`` numbers stay."""
        return States({n: s for n, s in self.names.items() if n < origins or n in used}, self.next)


def settle(
    state: S, models: Mapping[int, ClusterModel], states: States, round_: int
) -> tuple[S, States, tuple[RelayedStep, ...]]:
    """Return the strategy's state with every model at a state that devices hold, and the steps that lead there.

    Args:
        state: the strategy's state after it has closed round ``round_``, alone or together with the next plan's models.
        models: all its models by id (`Strategy.models_of`). Models that are one object are one state, under the least id; one
            that is not in ``state`` gets none.
        states: before the round.
        round_: its number.

    Returns:
        the settled state, the states that its models start from with the origins, and a step for each new state.

    Raises:
        IntegrityError: ``state`` has a moved model that ``models`` does not name.
    """
    steps: list[RelayedStep] = []
    settled: dict[int, ClusterModel] = {}
    names, number = dict(states.names), states.next
    present: set[int] = set()

    def look(value: ClusterModel) -> ClusterModel:
        present.add(id(value))
        return value

    replace_models(state, look)
    for model, value in sorted(models.items()):
        if is_state(value) or id(value) in settled or id(value) not in present:
            continue
        ref = names[number] = StateId(model, round_)
        terms = tuple((weight, states[at]) for at, weight in starts_of([(1.0, value)]).items())
        steps.append(RelayedStep(ref, terms, value.offset, value.contributors))
        settled[id(value)] = ClusterModel(number, version=value.version)
        number += 1
    used: set[int] = set()

    def at_state(value: ClusterModel) -> ClusterModel:
        if not is_state(value):
            if id(value) not in settled:
                raise IntegrityError("a strategy has moved a model that it does not name")
            value = settled[id(value)]
        used.add(value.origin)
        return value

    state = replace_models(state, at_state)
    origins = sum(ref.round == 0 for ref in names.values())
    return state, States(names, number).only(frozenset(used), origins), tuple(steps)


def numbers_in(state: object) -> frozenset[int]:
    """Return the numbers of the states that the models in a strategy's state start from."""
    found: set[int] = set()

    def look(value: ClusterModel) -> ClusterModel:
        found.update(starts_of([(1.0, value)]))
        return value

    replace_models(state, look)
    return frozenset(found)


def is_state(value: ClusterModel) -> bool:
    """Return whether the model is a state that devices hold, rather than a sum that they have yet to compute."""
    return value.offset is None and value.scale == 1 and not value.others


def replace_models(value: S, swap: Callable[[ClusterModel], ClusterModel]) -> S:
    """Return a copy of a strategy's state in which ``swap`` has replaced every model.

    Args:
        value: frozen dataclasses, tuples and mappings, nested in any way; other values stay as they are.
        swap: returns the model to put in place of one.
    """
    return _replaced(value, swap)  # type: ignore[no-any-return]


def _replaced(value: Any, swap: Callable[[ClusterModel], ClusterModel]) -> Any:
    match value:
        case ClusterModel():
            return swap(value)
        case tuple():
            found = [_replaced(item, swap) for item in value]
            return value if _same(found, value) else tuple(found)
        case Mapping():
            changed = {key: _replaced(item, swap) for key, item in value.items()}
            return value if _same(changed.values(), value.values()) else changed
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    swapped = {name: _replaced(item, swap) for name, item in fields.items()}
    if _same(swapped.values(), fields.values()):
        return value
    return dataclasses.replace(value, **{name: item for name, item in swapped.items() if item is not fields[name]})


def _same(found: Any, before: Any) -> bool:
    return all(one is other for one, other in zip(found, before, strict=True))
