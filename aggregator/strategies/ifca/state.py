"""IFCA's settings and state.

`Broadcast` saves communication: devices get all k models, or only their own (ifca extended, section 4.3).

Once no device has changed its identity in ``stable_rounds`` full broadcasts, devices are sent the model of their own
cluster only. Every ``probe_every``-th round is a full broadcast again; a device that then chooses another cluster, or
one that is asked to choose for another reason and changes, turns the full broadcast on for all. A device that has not
chosen since the last change, a newcomer for instance, is always sent all models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from aggregator.strategies.base import AUTO, ClusterModel, Reads, StrategySettings, parse_settings, require
from aggregator.strategies.grouping.search import MOST_FOUND, SearchState
from shoal.protocol.documents import RunPlan


@dataclass(frozen=True, slots=True)
class IfcaSettings(StrategySettings):
    """IFCA's own parameters.

    Attributes:
        k: models; ``auto`` finds the number, and starts from the models of the groups found instead of random ones.
        option: ``model`` (II) or ``gradient`` (I: one full-batch step a round, of size ``lr * lr_decay^(round - 1)``).
        normalise: divisor of a sum of updates: the number of ``machines`` (all m), of ``participants`` of the round or of
            devices of the ``cluster``; or ``samples`` (weighted by n_i within the cluster); ``auto`` is the
            paper's: machines for I, cluster for II.
        restarts: random starts, for a given k; restart_rounds: rounds each is given.
        stable_rounds: rounds without a changed identity after which devices are sent their own model only; 0 is never.
        probe_every: then every so many rounds all are asked to choose again.
    """

    clusters_setting: ClassVar[str] = "k"
    most_kept: ClassVar[int] = MOST_FOUND

    k: int = AUTO
    option: str = "model"
    normalise: str = "auto"
    restarts: int = 1
    restart_rounds: int = 10
    stable_rounds: int = 0
    probe_every: int = 10

    def __post_init__(self) -> None:
        counted = self.k >= 0 and self.restarts >= 1 and self.restart_rounds >= 1
        require(counted, "k, restarts and restart_rounds are at least 1", "leave out --set to take the defaults")
        require(
            self.k != AUTO or self.restarts == 1,
            f"{self.restarts} random starts of a number of models that is not given",
            "give the number with --set k=N, or leave restarts out",
        )

    @property
    def reads(self) -> Reads:
        """Means alone, unless groups are to be found."""
        return "updates" if self.k == AUTO else "means"

    @property
    def origins(self) -> int:
        """One for each of the k models of every start; a single one if k is to be found."""
        return max(1, self.k) * self.restarts

    @property
    def discarded_rounds(self) -> int:
        """The rounds of all starts but the one that is chosen."""
        return (self.restarts - 1) * self.restart_rounds


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Stability of the devices' cluster identities.

    Attributes:
        stable: full broadcasts in a row without a change; a round in which no device chose again does not count.
        quiet: rounds since the last full broadcast.
        confirmed: devices that have chosen among all models since the last change.
    """

    stable: int = 0
    quiet: int = 0
    confirmed: frozenset[str] = frozenset()

    def narrow(self, stable_rounds: int, probe_every: int) -> bool:
        """Whether the coming round is not a full broadcast."""
        return self.settled(stable_rounds) and self.quiet < probe_every - 1

    def probes_next(self, stable_rounds: int, probe_every: int) -> bool:
        """Whether the coming round is not a full broadcast, and the one after it is."""
        return self.settled(stable_rounds) and self.quiet == probe_every - 2

    def settled(self, stable_rounds: int) -> bool:
        """Whether identities count as stable; 0 rounds is never."""
        return 0 < stable_rounds <= self.stable

    def observed(self, chosen: Mapping[str, int], before: Mapping[str, int], *, full: bool) -> Broadcast:
        """Return the state after a round.

        Args:
            chosen: cluster by device, of those that chose among all models in this round.
            before: each device's cluster as of the round before.
            full: whether every assignment named all models.
        """
        again = {device: before[device] for device in chosen if device in before}
        if any(chosen[device] != cluster for device, cluster in again.items()):
            return Broadcast()
        return dataclasses.replace(
            self,
            stable=self.stable + (full and bool(again)),
            quiet=0 if full else self.quiet + 1,
            confirmed=self.confirmed.union(chosen),
        )


@dataclass(frozen=True, slots=True)
class IfcaState:
    """The models of the start that is under way, and the best finished start.

    Attributes:
        slots: k slots; shared: the segment that they have in common, None without weight sharing.
        first: model id of the first of the k models; the others follow it.
        start: which random start they belong to; started: rounds it has had.
        best, best_shared, best_start, best_loss, best_choice: the finished start of least training loss; the loss is None
            if no device reported one.
        settled: whether it was chosen for good.
        choice: each device's last chosen cluster.
        broadcast: stability of the devices' cluster identities.
        idle: place of a model among the slots -> rounds in a row in which too few devices chose it for a mean.
        retired: places of models that devices are not offered any more.
        asked: place of a model -> the last round in which its devices had their turn (`drawing.drawn_in_turn`).
        search: the search for groups while ``k`` is ``auto`` and none are found.
        kept_until: the last round in which devices keep their models, since these learn the scale of statistics of their own.
    """

    devices: tuple[str, ...]
    slots: tuple[ClusterModel, ...]
    shared: ClusterModel | None = None
    first: int = 0
    start: int = 0
    started: int = 0
    best: tuple[ClusterModel, ...] = ()
    best_shared: ClusterModel | None = None
    best_start: int = 0
    best_loss: float | None = None
    best_choice: Mapping[str, int] = field(default_factory=dict)
    settled: bool = False
    choice: Mapping[str, int] = field(default_factory=dict)
    broadcast: Broadcast = field(default_factory=Broadcast)
    idle: Mapping[int, int] = field(default_factory=dict)
    retired: frozenset[int] = frozenset()
    asked: Mapping[int, int] = field(default_factory=dict)
    search: SearchState | None = None
    kept_until: int = 0

    def settle(self) -> IfcaState:
        """Return the state in which the run continues with the best finished start."""
        return dataclasses.replace(
            self,
            slots=self.best,
            shared=self.best_shared,
            first=self.best_start * len(self.best),
            start=self.best_start,
            settled=True,
            choice=self.best_choice,
            best=(),
            best_shared=None,
        )

    @property
    def offered(self) -> dict[int, ClusterModel]:
        """The models among which devices choose, by id."""
        return {self.first + j: slot for j, slot in enumerate(self.slots) if j not in self.retired}


def checked_settings(run: RunPlan) -> IfcaSettings:
    """Return the settings of an IFCA run.

    Raises:
        ConfigError: they are out of range or don't fit the rest of the plan.
    """
    s: IfcaSettings = parse_settings(IfcaSettings, run)
    require(s.stable_rounds >= 0 and s.probe_every >= 1, "stable_rounds is at least 0, probe_every at least 1")
    require(s.option in ("model", "gradient"), f"option {s.option!r} is neither model nor gradient")
    known = ("auto", "machines", "participants", "cluster", "samples")
    require(s.normalise in known, f"normalise {s.normalise!r} is none of {', '.join(known)}")
    require(
        s.option == "model" or (run.local.batch_size == 0 and run.local.steps == 1 and not run.local.momentum),
        "option gradient takes one full-batch step a round",
        "set batch_size 0, steps 1 and momentum 0, or option model",
    )
    require(
        run.origins == s.origins or (s.restarts == 1 and s.begins_with(run.origins)),
        f"{s.restarts} starts of {max(1, s.k)} models need {s.origins} origins, the run ships {run.origins}",
    )
    require(
        s.restarts == 1 or s.restarts * s.restart_rounds < run.recipe.rounds,
        f"{s.restarts} starts of {s.restart_rounds} rounds leave none of {run.recipe.rounds} to the kept one",
        "raise rounds, or lower restarts or restart_rounds",
    )
    require(
        sorted(g.name for g in run.segments) in (["cluster"], ["cluster", "shared"]),
        "ifca needs one cluster segment and at most one shared one",
        "leave some parameters out of the shared ones",
    )
    require(
        s.k != AUTO or len(run.segments) == 1,
        "ifca can't find the number of models of a task with a shared segment",
        "give the number with --set k=N",
    )
    return s
