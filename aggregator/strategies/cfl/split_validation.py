"""Split validation: CFL finds a candidate, and loss scoring on held-out data confirms it.

The norm tests of Alg. 5 can't tell a true group from a device's own over-fitting. So both halves of a candidate
bipartition train from the parent for a few rounds, then every device scores both halves' models on its validation
share, the same scoring as IFCA's, and reports how much worse the other half's model is. The split stands only if each
side clearly prefers its own: the CFL paper's "always greater or equal" (section II-A), made a test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aggregator.strategies.base import ClusterModel, train_assignment
from shoal.protocol.messages import Assignment, Phase, Share


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
        figures: measures of the cut, for the events.
        trained: trial rounds done; waited: rounds in which a half could not be averaged, or not enough devices
            scored.
        firsts: the halves' models after the first trial round.
    """

    cluster: int
    left: Half
    right: Half
    figures: Mapping[str, Any]
    trained: int = 0
    waited: int = 0
    firsts: tuple[ClusterModel, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The scores of one side: share that prefer their own model, mean margin, and p-value of "no better than the other"."""

    devices: int
    prefer: float
    margin: float
    p_value: float


def trial_assignment(trial: Trial, own: Half, other: Half, trial_rounds: int) -> Assignment:
    """Return the next assignment of ``own``'s devices: train its model for ``trial_rounds``, then score both halves'."""
    if trial.trained < trial_rounds:
        return train_assignment((own.model,), evaluate=False, phase=Phase.TRIAL)
    return Assignment(
        Phase.SCORE, (own.model, other.model), Share.VALIDATION, train=False, evaluate=False, margins=True
    )


def judge(margins: Sequence[float]) -> Verdict:
    """Return the verdict of one side from its devices' margins (loss of the other half's model less that of their own).

    The p-value is the one-sided paired t-test's; a side of one device has none and gets 1.
    """
    values = np.asarray(margins, np.float64)
    n = len(values)
    mean = float(values.mean()) if n else 0.0
    prefer = float((values > 0).mean()) if n else 0.0
    return Verdict(n, prefer, mean, paired_t_p_value(values))


def paired_t_p_value(differences: np.ndarray) -> float:
    """Return P(T >= t) under "mean difference <= 0" for Student's t with n - 1 degrees of freedom."""
    n = len(differences)
    if n < 2:
        return 1.0
    mean, spread = float(differences.mean()), float(differences.std(ddof=1))
    # Equal differences have no t value: the mean divided by 0.
    if spread == 0.0:
        return 0.0 if mean > 0 else 1.0
    from scipy.special import stdtr  # only splits pay for loading scipy

    # P(T >= t) as P(T <= -t): 1 - P(T <= t) would lose the digits of a small p-value.
    return float(stdtr(n - 1, -mean / (spread / math.sqrt(n))))
