"""Means of a run with a keeper, as devices get them: the opened sum itself, with codes that only its devices could make.

A strategy forms its means from stand-ins, so each is the mean of a cell, or of several cells that were opened together, such as
the control of CFL's trials. `summed_body` finds these, and sends their integer sum with the numbers of devices and the codes
(`crypto.sums.codes`); devices check the codes, and make the mean of the sum themselves.

Example: CFL's control moves by the mean of its two halves. The body has the sum of both sums, the counts {3: 5, 4: 6}, and the
sum of both codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from aggregator.rounds.screening import Levels
from aggregator.strategies.base import RoundPlan
from crypto.sums.codes import CHECKS, Codes, added
from crypto.sums.ring import SHORT_BITS, Words, average, step_in, unit_of
from shoal.errors import IntegrityError
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Phase
from shoal.protocol.sums import SumCodes
from shoal.types import Float32Vector

LONGER: Final = 1.5
"""Room for growth from one round to the next; longer updates are scaled down, and the next step is larger."""
NEAR: Final = 1e-8
"""Largest squared distance of a strategy's mean from that of its cells, in squared lengths of the mean: it is rounded."""


@dataclass(frozen=True, slots=True)
class OpenedSum:
    """A cell that was opened.

    Attributes:
        model: that its devices trained from.
        count: of its devices.
        words: (d,) uint32, the sum of their fixed-point numbers.
        mean: (d,) float32.
        codes: the sum of theirs, `CHECKS` for each segment of the plan in order.
        unit: announced for the round.
    """

    model: int
    count: int
    words: Words = field(repr=False)
    mean: Float32Vector = field(repr=False)
    codes: Codes
    unit: float = 0.0


def short_unit(run: RunPlan, plan: RoundPlan, levels: Levels) -> float:
    """Return the step of the 16-bit numbers of a round; 0 for 32 bits.

    It leaves room for updates `LONGER` times as long as the longest of the last round, which only training tells: other rounds,
    and the first one, have 32 bits.

    Args:
        run: the owner's plan; one that allows no sums has no such numbers.
        plan: the round's.
        levels: of the last round.
    """
    longest = max((level for key, level in levels.items() if key.startswith("train/")), default=0.0)
    phases = {assignment.phase for assignment in plan.assignments.values() if assignment.train}
    trained = phases and phases <= {Phase.TRAIN, Phase.TRIAL, Phase.ADAPT}
    if run.recipe.precision_up == "float32" or not (run.most_summed and longest and trained):
        return 0.0
    return unit_of(min(run.recipe.norm_limit, LONGER * longest), run.length, run.most_summed, SHORT_BITS)


def summed_body(
    mean: Float32Vector, sums: Sequence[OpenedSum], segment: str, run: RunPlan
) -> tuple[bytes, Float32Vector]:
    """Return what devices get for a strategy's mean, and the mean as they make it of that.

    Args:
        mean: (d,) or the length of the segment, float32.
        sums: of the round.
        segment: its name; empty for whole vectors.
        run: the owner's plan.

    Raises:
        IntegrityError: it is not the mean of opened cells.
    """
    span = run.span(segment)
    chosen = _union(mean, sums, span)
    words = sum((one.words[span] for one in chosen), np.zeros(len(mean), np.uint32))
    counts: dict[int, int] = {}
    for one in chosen:
        counts[one.model] = counts.get(one.model, 0) + one.count
    parts = [at for at, spec in enumerate(run.segments) if segment in ("", spec.name)]
    codes = added(one.codes for one in chosen)
    told = tuple(codes[CHECKS * at + check] for at in parts for check in range(CHECKS))
    announced = chosen[0].unit
    codes_of = SumCodes(tuple(counts), tuple(counts.values()), told, announced)
    vector = average(words, sum(counts.values()), step_in(run, announced))
    return words.astype("<u4", copy=False).tobytes() + encode(codes_of), vector


def _union(mean: Float32Vector, sums: Sequence[OpenedSum], span: slice) -> list[OpenedSum]:
    """Return the cells whose mean is nearest to ``mean``."""
    rows = np.stack([mean, *(one.mean[span] for one in sums)]).astype(np.float64)
    products, counts = rows @ rows.T, np.array([one.count for one in sums], np.float64)
    found: list[tuple[float, int]] = []
    for chosen in range(1, 1 << len(sums)):
        weights = counts * [chosen >> at & 1 for at in range(len(sums))]
        weights = np.concatenate([[-1.0], weights / weights.sum()])
        found.append((float(weights @ products @ weights), chosen))
    distance, chosen = min(found, default=(np.inf, 0))
    if distance > NEAR * products[0, 0]:
        raise IntegrityError("a strategy's mean that is not one of opened cells")
    return [one for at, one in enumerate(sums) if chosen >> at & 1]
