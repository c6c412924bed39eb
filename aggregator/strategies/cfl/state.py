"""CFL's settings and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from aggregator.numerics.bipartition import LINKAGES
from aggregator.strategies.base import ClusterModel, Event, StrategySettings, require
from aggregator.strategies.cfl.split_validation import Trial, Verdict, combined_p_value
from aggregator.strategies.cfl.tree import BASES, Node
from shoal.protocol.documents import Capabilities, RunPlan

ROOT = 0
SIDE_P_VALUE: Final = 0.1
"""Neither half may gain by chance alone, however much the other one gains."""


@dataclass(frozen=True, slots=True)
class CflSettings(StrategySettings):
    """CFL's own parameters. The paper gives Alg. 5 absolute eps; the relative form travels between models.

    Attributes:
        linkage: ``single`` (Alg. 1, optimal), ``complete`` (as public implementations do) or ``average``; trials also try the
            others' cuts.
        form: ``relative``: eps1 is a share of the largest update norm of the round, eps2 of the largest seen in the
            first ``early_rounds``; ``absolute``: both are norms.
        eps1: the mean update's norm must be below it (Eq. 32).
        eps2: the largest update's norm must be above it (Eq. 33); 0 turns it off.
        gamma_max: split only if it is below sqrt((1 - alpha_cross_max)/2); 0 turns it off.
        cool_down: rounds after a split in which its halves are not split again.
        warm_up: rounds before the first test.
        validate: try a candidate split on held-out data first; off gives the paper's Alg. 5 alone.
        trial_rounds: rounds of a trial before the one in which devices compare.
        min_side: fewest devices of a half; -1 stands for 2, but for 1 where ``validate`` is off, as published.
        prefer, margin, p_value: limits of a trial. On either side the share of devices that prefer their half's model must be
            above ``prefer`` and the p-value of the t-test below `SIDE_P_VALUE`. Then both sides' p-values combined
            (Fisher's method) must be below ``p_value``, divided by the number of candidate splits of the cluster tried so far, or
            both mean margins (loss) at least ``margin``: three devices a side can't reach a small p-value, however large the
            gain.
        refused_cool_down: rounds without a trial after a refused one and after a merge; half of that if the evidence was near.
        max_age: rounds without an update after which a device no longer counts when devices may change clusters
            (reassignment.py).
        merge_every: rounds between checks whether two leaves of one cut do better than the model before it; 0 never
            checks, -1 stands for 20, but for 0 where ``validate`` is off: Alg. 5 alone never merges. A check takes the
            place of a training round of these two leaves, so every 20 costs them 5%.
        patience: checks in a row that a split must fail to be taken back.
        merge_p_value: a check fails if a leaf, or both together, prefer the model before the cut: more than
            three quarters of the devices, with a t-test below this.
        look_every: in every so many rounds devices that train are offered the models of up to four other leaves and may
            change clusters (reassignment.py); 0 never offers, -1 stands for 20, but for 0 where ``validate`` is off: Alg. 5
            alone knows no way back. A device fetches, scores and holds these models then; the loss that it reports is
            that before training.
        path: in the final round devices keep every model from their leaf to the root (section V-C).
        trace: report each cluster's norms of Eqs 32 and 33 in every round.
    """

    splits: ClassVar[bool] = True
    looks: ClassVar[bool] = True
    most_kept: ClassVar[int] = BASES // 4

    linkage: str = "single"
    form: str = "relative"
    eps1: float = 0.5
    eps2: float = 0.0
    gamma_max: float = 0.0
    cool_down: int = 3
    warm_up: int = 0
    early_rounds: int = 10
    validate: bool = True
    trial_rounds: int = 2
    min_side: int = -1
    prefer: float = 0.5
    margin: float = 0.1
    p_value: float = 0.001
    refused_cool_down: int = 10
    max_age: int = 20
    merge_every: int = -1
    patience: int = 2
    merge_p_value: float = 0.05
    look_every: int = -1
    path: bool = False
    trace: bool = False

    def compared(self, drawn: int, _fleet: int, /) -> int:
        """The devices that train: before its first split the fleet is one cluster."""
        return drawn

    @property
    def capabilities(self) -> Capabilities:
        """Trials and merge checks ask for margins, and newcomers compare directions."""
        return Capabilities(margins=self.uses_validation, keep_path=self.path, compare=True)

    @property
    def sums_suffice(self) -> bool:
        """With trials; Alg. 5 alone would need the sums of both halves in the round of the cut."""
        return self.validate

    def check(self) -> None:
        """Raise ConfigError if a value is out of range."""
        require(self.linkage in LINKAGES, f"linkage {self.linkage!r} is none of {', '.join(LINKAGES)}")
        require(self.form in ("relative", "absolute"), f"form {self.form!r} is neither relative nor absolute")
        require(self.eps1 > 0 and self.eps2 >= 0, "eps1 is positive and eps2 not negative")
        require(0 <= self.gamma_max < 1, "gamma_max lies in [0, 1)")
        require(self.trial_rounds >= 1, "trial_rounds is at least 1")
        require(self.min_side == -1 or self.min_side >= 1, "min_side is -1 for the default, or at least 1")
        require(0 <= self.prefer < 1 and 0 < self.p_value <= 1, "prefer and p_value are shares")
        require(self.max_age >= 1 and self.patience >= 1, "max_age and patience are at least 1")
        require(
            self.merge_every >= -1 and self.merge_every != 1,
            "merge_every is -1 for the default, 0 for never, or at least 2",
            hint="checked in every round, a cluster would never train",
        )
        require(
            self.look_every >= -1 and self.look_every != 1,
            "look_every is -1 for the default, 0 for never, or at least 2",
            hint="a round in which devices may move is no round to check splits in",
        )
        require(0 < self.merge_p_value <= 1, "merge_p_value is a share")

    @property
    def uses_validation(self) -> bool:
        """Whether devices score models on their validation share: in trials of splits and in later checks of them."""
        return self.validate or self.check_every > 0

    @property
    def check_every(self) -> int:
        """Rounds between two checks of a split; 0 where splits are never checked."""
        return self._rounds(self.merge_every)

    @property
    def look_rounds(self) -> int:
        """Rounds between two offers of other leaves' models; 0 where there are none."""
        return self._rounds(self.look_every)

    def least_side(self, run: RunPlan) -> int:
        """Return the fewest devices of a half: of fewer than ``min_contributors`` no mean could be taken."""
        own = self.min_side if self.min_side > 0 else 2 if self.validate else 1
        return max(own, run.recipe.min_contributors)

    def _rounds(self, given: int) -> int:
        if given >= 0:
            return given
        return 20 if self.validate else 0

    def convinces(self, sides: Sequence[Verdict], refused: int = 0) -> bool:
        """Return whether both sides' devices prefer their own half, and the gain is large or the evidence of both is clear.

        Args:
            sides: the verdicts of the two sides.
            refused: candidate splits of the cluster that were refused before. ``p_value`` is divided among all that are tried:
                of many trials on the same validation shares one seems clear by chance.
        """
        return self.likely(sides) and (all(v.margin >= self.margin for v in sides) or self.clear(sides, refused))

    def clear(self, sides: Sequence[Verdict], refused: int = 0) -> bool:
        """Return whether both sides' devices prefer their own half by clear evidence, however little they gain."""
        clear = combined_p_value([v.p_value for v in sides]) < self.p_value / (1 + refused)
        return clear and self.likely(sides)

    def likely(self, sides: Sequence[Verdict]) -> bool:
        """Return whether more than the share ``prefer`` of either side prefer their own half, each with a p-value below .1."""
        return all(v.prefer > self.prefer and min(v.p_value, v.shared) < SIDE_P_VALUE for v in sides)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A leaf of the tree: a group that shares a model. Its id is its model's id.

    ``quiet_until`` is the first round in which it may be split, ``refused`` the number of candidate splits that trials refused.
    """

    id: int
    members: tuple[str, ...]
    slot: ClusterModel
    quiet_until: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A candidate split.

    Attributes:
        sides: the devices of either half, in order.
        figures: its measures for the events, see `split.describe`.
    """

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CflState:
    """All clusters, the trials under way, and the tree.

    Attributes:
        unplaced: newcomers, and the node of the tree below which they belong.
        heard: device -> round of its newest update that its cluster has used.
        asked: cluster -> the last round in which it had its turn to train.
        early_norm: largest update norm of the first rounds.
        next_id: the next model id.
        cuts: cluster or half -> a candidate split that statistics show, until it is tried.
        kept: clusters whose devices lost by statistics of their own: they keep those of the cluster above.
    """

    clusters: Mapping[int, Cluster]
    trials: Mapping[int, Trial] = field(default_factory=dict)
    tree: Mapping[int, Node] = field(default_factory=dict)
    unplaced: Mapping[str, int] = field(default_factory=dict)
    heard: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[int, int] = field(default_factory=dict)
    early_norm: float = 0.0
    next_id: int = 1
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


Step = tuple[CflState, tuple[Event, ...]]
"""A new state and the events of the transition to it."""
