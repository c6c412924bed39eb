"""The close of a round, which the engine and the simulator share: screen, let the strategy close, and look for trouble.

It is pure: what the screen and the watches remember from one round to the next is in `Watched`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from aggregator.rounds.screening import Levels, Screened, screen
from aggregator.rounds.standing_apart import observed
from aggregator.rounds.standstill import RoundFacts, Standstill, observe
from aggregator.strategies.base import ClientUpdate, Outcome, RoundPlan, Strategy, of_one_round
from aggregator.strategies.robust import RobustMean, Standings
from shoal.protocol.documents import RunPlan


@dataclass(frozen=True, slots=True)
class Watched:
    """Norms, clusters and devices that are watched from round to round.

    Attributes:
        levels: median norms of the last round's accepted updates.
        standstill: clusters whose model has stalled.
        apart: devices whose updates are outliers.
    """

    levels: Levels = field(default_factory=dict)
    standstill: Standstill = field(default_factory=Standstill)
    apart: Standings = field(default_factory=Standings)


def close_round(
    strategy: Strategy,
    state: Any,
    plan: RoundPlan,
    updates: Iterable[ClientUpdate],
    watched: Watched,
    *,
    run: RunPlan,
    average: RobustMean | None,
    fleet: Collection[str],
    there: Collection[str],
    left_out: Collection[str] = (),
    declined: Collection[str] = (),
    screens: bool = True,
) -> tuple[Any, Outcome, Watched, Screened]:
    """Return the strategy's state after a round, the outcome, what is watched, and which updates were used.

    Args:
        strategy: the algorithm.
        state: its state in the round.
        plan: the round's plan.
        updates: the round's updates that were trained from the announced models.
        watched: before the round.
        run: the owner's plan.
        average: the strategy's means; None if nobody asks which devices stood apart in them.
        fleet: all devices that have not left.
        there: the devices that were available.
        left_out: devices whose update was left out before.
        declined: devices that declined.
        screens: whether updates with too large a norm are left out.
    """
    updates = tuple(updates)
    # Only the whole round shows which updates have too large a norm, so the strategy sees none of them earlier.
    screened = screen(updates, watched.levels) if screens else Screened(updates)
    apart = watched.apart
    if average is not None:
        average.begin(apart)
    state, outcome = strategy.close(state, plan, of_one_round(screened.accepted))
    facts = RoundFacts(
        plan=plan,
        clusters={device: cluster for device, cluster in outcome.clusters.items() if device in fleet},
        models=strategy.models_of(state),
        there=there,
        used=frozenset(c.device for c in screened.accepted),
        left_out=screened.refused.keys() | set(left_out),
        declined=declined,
    )
    standstill, events = observe(
        watched.standstill, facts, least=run.recipe.min_contributors, participation=run.recipe.participation
    )
    if average is not None:
        apart, named = observed(apart, average.take(), plan.round, run.recipe.robust)
        events = (*events, *named)
    outcome = dataclasses.replace(outcome, events=(*outcome.events, *events))
    return state, outcome, Watched(screened.levels, standstill, apart), screened
