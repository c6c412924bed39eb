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

from aggregator.strategies.base import ClusterModel, train_assignment
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
    """The scores of one side: share that prefer their own model, mean margin, and p-value of "no better than the other"."""

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

    Args:
        margins: n.
        weights: n, positive, such as numbers of samples: a margin of 4 samples says less than one of 120. None weighs all alike.
    """
    values = np.asarray(margins, np.float64)
    given = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    if not len(values):
        return Verdict(0, 0.0, 0.0, 1.0)
    prefer = float(given[values > 0].sum() / given.sum())
    mean = float(np.average(values, weights=given))
    return Verdict(len(values), prefer, mean, paired_t_p_value(values, given))


def paired_t_p_value(differences: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return P(T >= t) under "mean difference <= 0", for Student's t of a weighted mean; 1 for a single difference.

    Weighted differences count as 1 / sum of squared shares differences of equal weight (Kish), n if the shares are equal. The
    statistic has one degree of freedom less than that.

    Args:
        differences: shape (n,).
        weights: shape (n,), positive.
    """
    if len(differences) < 2:
        return 1.0
    shares = weights / weights.sum()
    count = 1.0 / float(shares @ shares)
    mean = float(shares @ differences)
    spread = math.sqrt(max(float(shares @ (differences - mean) ** 2), 0.0) * count / (count - 1.0))
    # Equal differences have no t value: the mean divided by 0.
    if spread <= 1e-12 * abs(mean):
        return 0.0 if mean > 0 else 1.0
    from scipy.special import stdtr  # only splits pay for loading scipy

    # P(T >= t) as P(T <= -t): 1 - P(T <= t) would lose the digits of a small p-value.
    return float(stdtr(count - 1.0, -mean / (spread / math.sqrt(count))))


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
