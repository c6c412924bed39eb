"""The mean of a cluster's updates under the run's robust rule: `RobustMean`, with which every strategy forms its means.

The rule weighs updates of one cluster among those that were trained from the same model. Similarities, splits and placements
use all updates as they are.

Example: a run with ``robust = rfa`` makes ``RobustMean(run)``; the strategy calls it for each cluster of a round, and
`RobustMean.take` then tells which devices stood apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import capped_weights, weighted_mean
from aggregator.numerics.backend import Backend, cosine_matrix
from aggregator.numerics.parted import is_parted
from aggregator.numerics.robust import FILTER, LEAST_UPDATES, Flags, Matrix, Towards, Vector, robust_weights
from aggregator.numerics.rows import read_once
from aggregator.strategies.base import Average, ClientUpdate, dot, mean_update, weights_of
from shoal.protocol.documents import RunPlan
from shoal.protocol.recipe import DEFAULTS
from shoal.types import Float32Vector

BLOCK_UPDATES: Final = 512
"""Most updates that are compared with each other. A larger cluster is weighed in blocks of equal size, in order of device id,
so that time and memory grow with the number of devices and not with its square."""
SUMS_OF_ROWS: Final = 3
"""Most sums of cosines for which the filter reads the updates twice; false updates may make it ask for many, and for those it
compares all updates at once."""
SAFE_LENGTHS: Final = (1e-6, 1e6)
"""Range of the norms for which it does so: float32 products of others may vanish or overflow."""


@dataclass(frozen=True, slots=True)
class Standings:
    """What is known of devices whose updates stood apart; see `aggregator.rounds.standstill`.

    Attributes:
        rounds: device -> rounds in a row in which its update stood apart.
        against: device -> models in whose means the filter left it out when it was last in them.
    """

    rounds: Mapping[str, int] = field(default_factory=dict)
    against: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a round's means found about one device.

    Attributes:
        apart: whether its update stood apart in any of them.
        against: model -> whether the filter left it out for its direction.
    """

    apart: bool
    against: Mapping[int, bool]


class RobustMean:
    """Forms means by a run's robust rule, and tells which devices stood apart.

    Inter-group aggregation computes lengths of models from the plain weights, so such runs have plain means.

    Args:
        run: the plan, which names the rule.
        backend: computes dot products; numpy if None.
        plain: forms the means that need no rule.
    """

    def __init__(self, run: RunPlan, backend: Backend | None = None, plain: Average = mean_update) -> None:
        self.rule = "off" if run.capabilities.scale else run.recipe.robust
        self.least = run.recipe.min_contributors
        self.backend = backend
        self.plain = plain
        self._known = Standings()
        self._found: dict[str, Finding] = {}

    def begin(self, known: Standings) -> None:
        """Take over what is known of the devices before a round closes."""
        self._known, self._found = known, {}

    def take(self) -> Mapping[str, Finding]:
        """Return the findings since `begin`, of every device in a mean that the rule weighed."""
        found, self._found = self._found, {}
        return found

    def __call__(self, contributions: list[ClientUpdate], weighting: str, cap: float = 0.0) -> Float32Vector:
        """Return the mean update, (d,) float32: see `aggregator.strategies.base.Average`.

        A mean that would have fewer than ``min_contributors`` updates of a weight above 0 is the plain mean.
        """
        if self.rule == "off" or len(contributions) < LEAST_UPDATES:
            return self.plain(contributions, weighting, cap)
        plain = weights_of(contributions, weighting, cap)
        weights = plain.copy()
        for places in _blocks(contributions):
            if len(places) >= LEAST_UPDATES and plain[places].any():
                weights[places] = self._weighed([contributions[at] for at in places], plain[places], cap)
        if np.array_equal(weights, plain) or np.count_nonzero(weights) < self.least:
            return self.plain(contributions, weighting, cap)
        mean = weighted_mean([c.row for c in contributions], weights)
        share = float(weights.sum() / plain.sum())
        return mean if share == 1.0 else mean * np.float32(share)

    def _weighed(self, given: list[ClientUpdate], plain: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
        """Return the weights of updates that were trained from one model, and note the outliers."""
        model = given[0].model
        lengths = np.array([c.norm for c in given])
        # Cosines stand any length of an update; float32 products do not. The longest update has length 1 here.
        longest = float(lengths.max())
        if longest == 0.0:
            return plain
        lengths = lengths / longest
        rows = [c.row for c in given]
        safe = SAFE_LENGTHS[0] < longest * float(lengths.min()) and longest < SAFE_LENGTHS[1]
        if self.rule == FILTER and safe and not is_parted(rows):
            products: Matrix | tuple[Vector, Towards] = lengths, _towards(rows, lengths * longest, self.backend)
        else:
            products = cosine_matrix(rows, backend=self.backend) * np.outer(lengths, lengths)
        before = np.array([model in self._known.against.get(c.device, ()) for c in given])
        found = robust_weights(self.rule, products, plain, before)
        for c, apart, against in zip(given, found.apart.tolist(), found.against.tolist(), strict=True):
            earlier = self._found.get(c.device, Finding(False, {}))
            self._found[c.device] = Finding(earlier.apart or apart, {**earlier.against, model: against})
        if np.array_equal(found.values, plain):
            return plain
        # A rule may settle on a single update, which a mean must not show.
        bounded = capped_weights(found.values, cap or DEFAULTS.weight_cap)
        shared: NDArray[np.float64] = bounded * (found.values.sum() / bounded.sum())
        return shared


def _towards(rows: list[Float32Vector], lengths: Vector, backend: Backend | None) -> Towards:
    """Return the sums of cosines of ``rows`` with the norms ``lengths``, each for two passes over the rows: see SUMS_OF_ROWS."""
    cosines = cache(lambda: cosine_matrix(rows, backend=backend))
    left, inverse = iter(range(SUMS_OF_ROWS)), 1.0 / lengths

    def towards(chosen: Flags) -> Vector:
        if next(left, None) is None:
            return np.asarray(cosines()[:, chosen].sum(axis=1))
        mean = weighted_mean(rows, np.where(chosen, inverse, 0.0))
        return np.array([dot(row, mean) for row in read_once(rows)]) * inverse * float(inverse[chosen].sum())

    return towards


def _blocks(contributions: list[ClientUpdate]) -> Iterator[list[int]]:
    """Yield the places of updates that are weighed together."""
    by_model: dict[int, list[int]] = defaultdict(list)
    for at, c in enumerate(contributions):
        by_model[c.model].append(at)
    for places in by_model.values():
        count = -(-len(places) // BLOCK_UPDATES)
        yield from (part.tolist() for part in np.array_split(np.array(places), count))
