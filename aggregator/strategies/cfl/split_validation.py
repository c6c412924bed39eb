"""Split validation: CFL finds a candidate, and loss scoring on held-out data confirms it.

The norm tests of Alg. 5 can't tell a true group from a device's own over-fitting. So both halves of a candidate bipartition
train from the parent for a few rounds, and the parent, the control, goes on with the mean of all their updates, as without a
split. In the last round every device trains both its half's model and the control, scores the results on its validation share
and reports how much worse the control is. The split stands only if each side clearly prefers its own: the CFL paper's "always
greater or equal" (section II-A), made a test. Both are trained on the device first since label skew looks like a group until
then: a device adapts any model to its own labels, but not to another group's. A refused trial costs no training, as the
control is the cluster's model then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.trimmed import FIGURE_STEP, inner, winsorised
from aggregator.strategies.base import STANDS_APART, ClientUpdate, ClusterModel, Event, train_assignment
from shoal.protocol.messages import Assignment, Phase, Share

WEAK_P_VALUE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Half:
    """One side of a candidate split: its devices, and the model they train on trial."""

    model: int
    members: tuple[str, ...]
    slot: ClusterModel


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate split under test.

    Attributes:
        cluster: the parent's id; left, right: the halves.
        before: the parent's model when the trial began.
        figures: measures of the cut, for the events.
        trained: trial rounds done; waited: rounds in which a half could not be averaged, or not enough devices
            scored.
        firsts: the halves' models after the first trial round.
        extended: how often it was extended, since the evidence was near.
    """

    cluster: int
    left: Half
    right: Half
    before: ClusterModel
    figures: Mapping[str, Any]
    trained: int = 0
    waited: int = 0
    firsts: tuple[ClusterModel, ...] = ()
    extended: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The scores of one side: share that prefer their own model, mean margin, and p-value of "no better than the other".

    Of five devices or more, share and mean are those of all but the smallest and the largest margin.
    """

    devices: int
    prefer: float
    margin: float
    p_value: float


def trial_assignment(trial: Trial, half: Half, trial_rounds: int) -> Assignment:
    """Return the next assignment of a half's devices: train its model for ``trial_rounds``, then compare it with the control."""
    candidates = (half.model, trial.cluster)
    if trial.trained < trial_rounds:
        return train_assignment(candidates, evaluate=False, phase=Phase.TRIAL)
    return Assignment(Phase.ADAPT, candidates, Share.VALIDATION, train=True, evaluate=False, margins=True)


def judge(margins: Sequence[float], weights: Sequence[float] | NDArray[np.float64] | None = None) -> Verdict:
    """Return the verdict of one side from its devices' margins (loss of the other model less that of their own).

    One margin of five or more decides nothing, whatever it is: the devices of the smallest and the largest are left out.

    Args:
        margins: n.
        weights: n, positive, such as numbers of samples: a margin of 4 samples says less than one of 120. None weighs all alike.
    """
    values = np.asarray(margins, np.float64)
    given = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    if not len(values):
        return Verdict(0, 0.0, 0.0, 1.0)
    kept = inner(values)
    prefer = float(given[kept & (values > 0)].sum() / given[kept].sum())
    mean = float(np.average(values[kept], weights=given[kept]))
    return Verdict(len(values), prefer, mean, paired_t_p_value(values, given))


def contradictions(given: Sequence[ClientUpdate], cluster: int, round_: int, large: float) -> tuple[Event, ...]:
    """Return an event for the device whose margin contradicts all others of its side, if there is one and at least two agree.

    Either its data are not like theirs, or the margin is false. Of small margins one has the other sign by chance every now and
    then, so only a large one is named.

    Args:
        given: the side's uploads, with margins.
        cluster: the cluster on trial, or the leaf that is checked.
        round_: of the uploads.
        large: least size of a margin that is named.
    """
    margins = {c.device: c.margins[1] for c in given}
    signs = [{d for d, m in margins.items() if m > 0}, {d for d, m in margins.items() if m < 0}]
    alone = min(signs, key=len)
    if len(alone) != 1 or len(margins) < 3 or len(signs[0] | signs[1]) < len(margins):
        return ()
    (device,) = alone
    if abs(margins[device]) < large:
        return ()
    others = float(np.median([m for d, m in margins.items() if d != device]))
    detail = {"cluster": cluster, "device": device, "margin": margins[device], "others": others}
    return (Event(round_, STANDS_APART, detail),)


def paired_t_p_value(differences: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return P(T >= t) under "mean difference <= 0", for Yuen's t of a weighted trimmed mean; 1 for a single difference.

    Yuen (1974): t = m sqrt(h (h - 1) / (n s)), with the mean m of the h inner differences and the mean square s of all n
    winsorised ones from their mean, has h - 1 degrees of freedom. Of fewer than five nothing is trimmed: Student's t. Weights go
    with the devices, not with the values: a trimmed device has no weight in the mean, and a winsorised one keeps its own.
    Weighted differences count as 1 / sum of squared shares differences of equal weight (Kish), n if the shares are equal.

    Args:
        differences: shape (n,).
        weights: shape (n,), positive.
    """
    if len(differences) < 2:
        return 1.0
    kept, values = inner(differences), winsorised(differences)
    shares, inside = weights / weights.sum(), weights[kept] / weights[kept].sum()
    count, counted = 1.0 / float(shares @ shares), 1.0 / float(inside @ inside)
    mean, centre = float(inside @ differences[kept]), float(shares @ values)
    spread = math.sqrt(max(float(shares @ (values - centre) ** 2), 0.0) * count / (counted - 1.0))
    # Three rounded differences are equal by chance more often than all of them.
    spread = spread if kept.all() else max(spread, FIGURE_STEP)
    # Equal differences have no t value: the mean divided by 0.
    if spread <= 1e-12 * abs(mean):
        return 0.0 if mean > 0 else 1.0
    from scipy.special import stdtr  # only splits pay for loading scipy

    # P(T >= t) as P(T <= -t): 1 - P(T <= t) would lose the digits of a small p-value.
    return float(stdtr(counted - 1.0, -mean / (spread / math.sqrt(counted))))


def goes_on(sides: Sequence[Verdict]) -> bool:
    """Return whether a trial that does not convince yet may still: there is weak evidence, and neither side speaks against it."""
    weak = combined_p_value([v.p_value for v in sides]) < WEAK_P_VALUE
    return weak and all(v.p_value <= 1.0 - WEAK_P_VALUE for v in sides)


def combined_p_value(p_values: Sequence[float]) -> float:
    """Return the p-value of one or two independent tests together (Fisher's method).

    -2 ln(p q) has a chi-squared distribution with four degrees of freedom, whose tail at x is exp(-x/2) (1 + x/2).
    """
    if len(p_values) == 1:
        return p_values[0]
    product = math.prod(p_values)
    return product * (1.0 - math.log(product)) if product > 0.0 else 0.0
