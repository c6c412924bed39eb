"""The close of a round, which the engine and the simulator share: screen, let the strategy close, and look for trouble.

It is pure: what the screen and the watches remember from one round to the next is in `Watched`.

`sampled_cosines` puts a bounded sample of the cosines between the round's updates into the record. A mask keeps cosines, so
their matrix, ordered by cluster, shows a person whether the clusters are right. The record has at most MOST_DEVICES of the
devices, evenly drawn from the clusters, and cosines in hundredths. Long updates are compared on MOST_COORDINATES of their
coordinates; under a rotation the standard error of such a cosine is at most 0.006.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from aggregator.numerics.backend import cosine_matrix
from aggregator.numerics.rows import read_once
from aggregator.rounds.screening import Levels, Screened, screen
from aggregator.rounds.standstill import RoundFacts, Standstill, observe, observed
from aggregator.rounds.summed import OpenedSum
from aggregator.rounds.suspects import Cells
from aggregator.strategies.base import ClientUpdate, Event, Outcome, Parts, RoundPlan, Strategy, of_one_round
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


@dataclass(frozen=True, slots=True)
class OpenedCells:
    """What a round is closed on.

    Attributes:
        updates: the stand-ins, in order of their devices.
        events: about updates without one.
        sums: that were opened.
        opened, spoilt: devices of each model's cells whose sum is used, or is not.
    """

    updates: tuple[ClientUpdate, ...]
    events: tuple[Event, ...] = ()
    sums: tuple[OpenedSum, ...] = ()
    opened: Cells = field(default_factory=dict)
    spoilt: Cells = field(default_factory=dict)


class Opener(Protocol):
    """Opens the sums of a round's updates in a run with a keeper; see `aggregator.sums`."""

    def open(
        self,
        round_: int,
        nonce: bytes,
        updates: Sequence[ClientUpdate],
        cells: Parts,
        left_out: Collection[str],
        unit: float,
        /,
    ) -> OpenedCells:
        """Return the stand-ins of updates, which are in order of their devices; see `aggregator.sums.CellOpener.open`."""


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


MOST_DEVICES: Final = 48
MOST_COORDINATES: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Cosines:
    """The cosines between the updates of some devices.

    Attributes:
        devices: n names, in order of their clusters.
        hundredths: base64 of the n (n - 1) / 2 cosines above the diagonal, row by row, each times 100 as a signed byte.
    """

    devices: tuple[str, ...]
    hundredths: str


def sampled_cosines(updates: Sequence[ClientUpdate], clusters: Mapping[str, int]) -> Cosines | None:
    """Return the cosines of at most MOST_DEVICES updates; None if fewer than two devices have sent one.

    Args:
        updates: of one round, each with or without a vector.
        clusters: device -> cluster after the round; devices without one come last.
    """
    last = 1 + max(clusters.values(), default=0)
    rows = sorted((u for u in updates if u.vector is not None), key=lambda u: (clusters.get(u.device, last), u.device))
    chosen = [rows[i * len(rows) // MOST_DEVICES] for i in range(MOST_DEVICES)] if len(rows) > MOST_DEVICES else rows
    if len(chosen) < 2:
        return None
    step = -(-len(chosen[0].row) // MOST_COORDINATES)
    cosines = cosine_matrix([row[::step].copy() for row in read_once([u.row for u in chosen])])
    above = np.rint(100 * cosines[np.triu_indices(len(chosen), 1)]).astype(np.int8)
    return Cosines(tuple(u.device for u in chosen), base64.b64encode(above.tobytes()).decode())
