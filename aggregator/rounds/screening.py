"""The two limits on the norm of an update: the plan's absolute limit, and a limit relative to the other updates.

`norm_error` is the absolute limit: such an update is refused when it arrives. `screen` is the relative one: an update much
longer than the others of its round is left out of every mean. A round is screened when it closes, because the first round
has no earlier one to compare with. The decision depends only on durable uploads and on the levels in the resume metadata,
so a restarted aggregator decides the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_high, median_low
from typing import Final

from aggregator.strategies.base import ClientUpdate
from shoal.limits import NORM_LIMIT_RATIO
from shoal.protocol.messages import Phase

LEAST_FOR_MEDIAN: Final = 3
"""Least number of updates whose own median counts: with two, one device could set it for the other."""
UPDATE_RECIPES: Final = ("train", "pretrain", "statistics")
UPDATE_PHASES: Final = (Phase.TRAIN, Phase.TRIAL, Phase.ADAPT, Phase.PRETRAIN, Phase.STATISTICS)

_RECIPES: Final = {Phase.PRETRAIN: "pretrain", Phase.STATISTICS: "statistics"}

Levels = Mapping[str, float]
"""Median norm of the accepted updates of the last round, by recipe ("train", "pretrain") and by model ("train/3")."""


@dataclass(frozen=True, slots=True)
class Screened:
    """A round's contributions after screening.

    Attributes:
        accepted: the contributions for the strategy, in the order given.
        refused: device -> norm, for updates that are left out.
        levels: the levels for the next round.
        limit: largest norm that an accepted update may have had, by the limit of its model; 0 if none is accepted.
    """

    accepted: tuple[ClientUpdate, ...]
    refused: Mapping[str, float] = field(default_factory=dict)
    levels: Levels = field(default_factory=dict)
    limit: float = 0.0


def norm_error(norm: float, limit: float) -> str:
    """Return why an update of this norm is refused on arrival; empty for one that is not.

    Args:
        norm: l2 norm of the update.
        limit: the plan's absolute norm limit.
    """
    if not math.isfinite(norm):
        return "the update holds NaN or infinities, or overflows"
    return f"the update's norm {norm:.3g} is above the plan's limit {limit:.3g}" if norm > limit else ""


def screen(given: Iterable[ClientUpdate], levels: Levels) -> Screened:
    """Separate a round's contributions into those the strategy may use and those with too large a norm.

    An update is refused if its norm is above ``NORM_LIMIT_RATIO`` times the largest of these medians: of the last round's
    accepted updates, of all updates in this round, and of those in this round that were trained from the same model. The
    last two count from ``LEAST_FOR_MEDIAN`` updates on. They admit a change that most devices show, such as new data or a
    restart of IFCA, and a cluster whose updates are longer than those of other clusters. A median of 0 is no reference,
    and without any reference nothing is refused.

    Args:
        given: the round's contributions; those without training are accepted.
        levels: levels from the previous round; empty in the first.
    """
    given = tuple(given)
    norms: dict[str, list[float]] = defaultdict(list)
    for c in given:
        for key in _keys(c):
            norms[key].append(c.norm)
    own = {key: median_low(found) for key, found in norms.items() if len(found) >= LEAST_FOR_MEDIAN}
    accepted: list[ClientUpdate] = []
    refused: dict[str, float] = {}
    passed: dict[str, list[float]] = defaultdict(list)
    limit = 0.0
    for c in given:
        keys = _keys(c)
        reference = max((source.get(key, 0.0) for key in keys for source in (levels, own)), default=0.0)
        if reference and c.norm > NORM_LIMIT_RATIO * reference:
            refused[c.device] = c.norm
            continue
        accepted.append(c)
        # Without a reference any norm is accepted, so the longest update is the reference.
        limit = max(limit, NORM_LIMIT_RATIO * (reference or c.norm)) if keys else limit
        for key in keys:
            passed[key].append(c.norm)
    # A recipe of which this round refused every update starts again without a level: a pair of devices whose data have
    # changed would otherwise be refused in every later round.
    trained = {_recipe(key) for key in norms}
    found = {key: level for key, level in levels.items() if _recipe(key) not in trained}
    for key, kept in passed.items():
        # Of the only two updates in a round the longer one counts: by a tiny update one device could otherwise shut the
        # other out. Two in one cluster are also compared with all others, so there the shorter one counts.
        pair = key in UPDATE_RECIPES and len(kept) < LEAST_FOR_MEDIAN
        level = (median_high if pair else median_low)(kept) or levels.get(key, 0.0)
        if level:
            found[key] = level
    return Screened(tuple(accepted), refused, found, limit)


def _keys(contribution: ClientUpdate) -> tuple[str, ...]:
    """Return the levels that a contribution is compared with and counts in; none where it is not screened."""
    if contribution.phase not in UPDATE_PHASES:
        return ()
    # Pre-training has its own number of steps, and statistics are no update: their norms say nothing about other rounds.
    recipe = _RECIPES.get(contribution.phase, "train")
    return recipe, f"{recipe}/{contribution.model}"


def _recipe(key: str) -> str:
    return key.partition("/")[0]
