"""Split validation: CFL finds a candidate, and loss scoring on held-out data confirms it.

The norm tests of Alg. 5 can't tell a true group from a device's own over-fitting. So both halves of a candidate bipartition
train from the parent for a few rounds, and the parent, the control, goes on with the mean of all their updates, as without a
split. In the last round every device scores its half's model and the control on its validation share, as they come and once
more after training both. The split stands only if each side clearly prefers its own: the CFL paper's "always greater or equal"
(section II-A), made a test. There are two ways to show it, since either comparison alone misleads:

- *The margin* counts only what a device gains both as the models come and after training. Under label skew a half's model gains
  as it comes, and no more once a device has trained the control on its own labels.
- *The untrained margin* is that of the models as they come, each label with equal weight, if it is less. A deep network learns
  even another group's labels in an epoch, so that after training nothing is left of the gain of a true group.
- *The margin by labels* is that of the models as they come, each label with equal weight. It shows a gain of .02 nats, as of
  two labels of ten, that the lesser of two figures hides in noise. It counts if the margin too is likely.

A refused trial costs no training, as the control is the cluster's model then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.robust import FEWEST_TRIMMED, FIGURE_STEP, inner, winsorised
from aggregator.strategies.base import STANDS_APART, ClientUpdate, ClusterModel, Event, train_assignment
from shoal.protocol.messages import Assignment, Phase, Share

WEAK_P_VALUE: Final = 0.1
SCALED_TIMES: Final = 3
"""How much longer halves train on trial that have statistics of their own: their models learn another scale first."""


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
        trained: rounds that the halves have trained since the last look; below 0, rounds that the control trains before them.
        waited: rounds in which a half could not be averaged, or not enough devices scored.
        firsts: the halves' models after the first trial round.
        extended: how often it was extended, since the evidence was near.
        scaled: whether the halves have statistics of their own. The control trains by itself then, before the halves.
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
    scaled: bool = False

    def length(self, trial_rounds: int) -> int:
        """Return the rounds that the halves train before devices compare: `CflSettings.trial_rounds`, or more in a new scale."""
        return trial_rounds * (SCALED_TIMES if self.scaled else 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The scores of one side: share that prefer their own model, mean margin, and p-value of "no better than the other".

    Of five devices or more, share and mean are those of all but the smallest and the largest margin. `shared` is the lesser of
    the p-value and that by the spread of both sides.
    """

    devices: int
    prefer: float
    margin: float
    p_value: float
    shared: float = 1.0


def trial_assignment(trial: Trial, half: Half, trial_rounds: int) -> Assignment:
    """Return the next assignment of a half's devices: train its model for ``trial_rounds``, then compare it with the control.

    A prolonged trial, and one with statistics of the halves, begin with the control's own training.
    """
    candidates = (half.model, trial.cluster) if trial.trained >= 0 else (trial.cluster, half.model)
    if trial.trained < trial.length(trial_rounds):
        return train_assignment(candidates, evaluate=False, phase=Phase.TRIAL)
    return Assignment(Phase.ADAPT, candidates, Share.VALIDATION, train=True, evaluate=False, margins=True)


def judge(
    margins: Sequence[float],
    across: Sequence[float] = (),
    *,
    says: Sequence[float] | None = None,
    across_says: Sequence[float] | None = None,
) -> Verdict:
    """Return the verdict of one side from its devices' margins (loss of the other model less that of their own).

    One device of five or more decides nothing: those of the smallest and the largest margin are left out.

    Args:
        margins: of the side's devices.
        across: margins of the other side's devices, from which a side of fewer than five also learns how far margins spread.
        says: of the side's devices, by which their margins count; one vote each if None.
        across_says: of the other side's.
    """
    values, others = np.asarray(margins, np.float64), np.asarray(across, np.float64)
    if not len(values):
        return Verdict(0, 0.0, 0.0, 1.0)
    side, alone = _Sample.trimmed(values, says), paired_t_p_value(values, says)
    shared = alone
    if 1 < len(values) < FEWEST_TRIMMED and len(others) > 1:
        shared = min(alone, side.p_value(_Sample.trimmed(others, across_says)))
    prefer = float(np.average(side.kept > 0, weights=side.kept_says))
    return Verdict(len(values), prefer, side.mean, alone, shared)


def judge_both(sides: Sequence[Sequence[ClientUpdate]], which: int) -> list[Verdict]:
    """Return the verdicts of the two sides of a cut.

    A device has one vote from the median number of samples of all of them on, and below it the share of the median that it has:
    the margin of a device with few samples is mostly noise. A false number lowers a device's own say at most.

    Args:
        sides: the devices' uploads.
        which: number of the margin among those of a device. Devices without it have no vote.
    """
    middle = float(np.median([c.samples for side in sides for c in side]))
    sides = [[c for c in side if len(c.margins) > which] for side in sides]
    says = [[min(1.0, c.samples / middle) for c in side] for side in sides]
    margins = [[c.margins[which] for c in side] for side in sides]
    return [judge(margins[i], margins[1 - i], says=says[i], across_says=says[1 - i]) for i in (0, 1)]


def contradictions(given: Sequence[ClientUpdate], cluster: int, round_: int, large: float) -> tuple[Event, ...]:
    """Return an event for the device whose margin contradicts all others of its side, if there is one and at least two agree.

    Either its data are not like theirs, or the margin is false. Where only cells have figures, none is named. Of
    small margins one has the other sign by chance every now and then, so only a large one is named.

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
    if abs(margins[device]) < large or any(c.summed for c in given):
        return ()
    others = float(np.median([m for d, m in margins.items() if d != device]))
    detail = {"cluster": cluster, "device": device, "margin": margins[device], "others": others}
    return (Event(round_, STANDS_APART, detail),)


def paired_t_p_value(differences: NDArray[np.float64], says: Sequence[float] | None = None) -> float:
    """Return P(T >= t) under "mean difference <= 0", for Student's t or Yuen's, whichever is less; 1 for a single difference.

    One false difference far below the others hides their gain from Student's t, but not from Yuen's. None far above them makes a
    gain out of none for either: its square widens the spread as much as it raises the mean. Student's t has the power that
    Yuen's lacks in small sides.

    Args:
        differences: shape (n,).
        says: by which they count; equal if None.
    """
    if len(differences) < 2:
        return 1.0
    return min(_Sample.of(differences, says).p_value(), _Sample.trimmed(differences, says).p_value())


@dataclass(frozen=True, slots=True)
class _Sample:
    """The h inner differences of n, ``kept``, and all n winsorised ones, ``whole``: Yuen (1974), or Student if h = n.

    Both have the says by which they count. With unequal says the variance of their mean is the jackknife's, by which one large
    difference is no proof either, whatever its say.
    """

    kept: NDArray[np.float64]
    whole: NDArray[np.float64]
    kept_says: NDArray[np.float64]
    says: NDArray[np.float64]

    @classmethod
    def of(cls, values: NDArray[np.float64], says: Sequence[float] | None) -> _Sample:
        counts = np.ones(len(values)) if says is None else np.asarray(says, np.float64)
        return cls(values, values, counts, counts)

    @classmethod
    def trimmed(cls, values: NDArray[np.float64], says: Sequence[float] | None) -> _Sample:
        counts, kept = cls.of(values, says).says, inner(values)
        return cls(values[kept], winsorised(values), counts[kept], counts)

    @property
    def mean(self) -> float:
        return float(np.average(self.kept, weights=self.kept_says))

    @property
    def squares(self) -> float:
        """The sum of squares about the mean, of which h - 1 are free: of equal says by the mean's variance if they are not."""
        shares, count = self.says / self.says.sum(), len(self.says)
        # How far the mean moves without each of them.
        shifts = shares * (self.whole - shares @ self.whole) / (1.0 - shares)
        return float(shifts @ shifts) * _votes(self.says) * (count - 1) ** 2 / count

    def p_value(self, *others: _Sample) -> float:
        """Return the p-value of t = m sqrt(h / s), with the mean m of the inner differences and the pooled variance s.

        With unequal says h is their effective number.
        """
        freedom = sum(len(one.kept) - 1 for one in (self, *others))
        spread = math.sqrt(sum(one.squares for one in (self, *others)) / freedom)
        # Rounded differences are equal by chance more often than true ones.
        spread = max(spread, FIGURE_STEP)
        from scipy.special import stdtr  # only splits pay for loading scipy

        # P(T >= t) as P(T <= -t): 1 - P(T <= t) would lose the digits of a small p-value.
        return float(stdtr(freedom, -self.mean / (spread / math.sqrt(_votes(self.kept_says)))))


def _votes(says: NDArray[np.float64]) -> float:
    """Return how many equal votes have the mean of these: n if they are equal (Kish, 1965)."""
    return float(says.sum()) ** 2 / float(says @ says)


def refusal(sides: Sequence[Verdict], apart: Sequence[Sequence[Event]], prefer: float, margin: float) -> str:
    """Return in one sentence why a split is refused, and what would decide it.

    Args:
        sides: both verdicts on the margins.
        apart: of either side, the event for the device whose margin contradicts all others, if there is one.
        prefer: limit of the share that prefers its half's model.
        margin: gain on both sides that decides without further evidence.
    """
    for verdict, events in zip(sides, apart, strict=True):
        for event in events:
            if verdict.devices < FEWEST_TRIMMED:
                contrary = (
                    f"{event.detail['device']} contradicts all others of its half, which are too few to overrule it"
                )
                return f"{contrary}: check its data, or let at least {FEWEST_TRIMMED} devices decide"
    worse = min(sides, key=lambda v: v.prefer)
    if worse.prefer <= prefer:
        share = f"{worse.prefer:.0%} of one half's {worse.devices} devices, by their say,"
        better = f"{share} do better with its model than with the common one"
        return f"{better}, and more than {prefer:.0%} must: another cut would decide, or more training"
    gains = " and ".join(f"{v.margin:.3g}" for v in sides)
    few = [v.devices for v in sides if v.devices < FEWEST_TRIMMED]
    among = f" among {' and '.join(map(str, few))} devices" if few else ""
    more = "more devices or validation samples" if few else "more validation samples"
    return f"gains of {gains} in loss may be chance{among}: {more} would decide, or at least {margin:g} in both halves"


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
