"""What a simulated run is told and what it tells of its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aggregator.strategies.base import Event
from shoal.limits import DEFAULT_WEIGHT_CAP
from shoal.protocol.documents import LocalSettings
from shoal.simulation.engine.evaluation import Protocol
from shoal.task.manifest import LocalTraining


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What a simulated run is beside its strategy, data and network.

    Attributes:
        rounds: that count: see ``count``; rounds of IFCA's starts that were not kept never do.
        seed: of origins, participation, batch orders and the mask.
        mask: a mask mode of `crypto.mask.modes.registry`, or "none".
        local: recipe of training; pretrain: of phase PRETRAIN, ``local`` where None.
        participation: share of the devices drawn a round; weighting: "samples" or "uniform".
        weight_cap: as in `RunPlan`; norm_screen: leave out what `aggregator.rounds.screening` refuses. The papers know neither.
        min_contributors: fewest devices behind a mean.
        evaluate_every: evaluate after every so many counted rounds; 0 is at the end only.
        count: "train" counts rounds in which somebody trains in phase TRAIN, "all" every round.
        protocol: how accuracy is taken, see `evaluation.evaluate`.
        segments: names and lengths in the order of theta where weights are shared; one ``cluster`` segment if empty.
        trainer, device, threads, deferred, norms: see `workforce.Workforce`.
        checkpoint: a file that the run is kept in every minute, and taken up from where it is there.
        arrivals: device -> the first of all rounds, counted or not, that it can take part in; everybody else is there from
            round 1. Before that the strategy never hears of it.
    """

    rounds: int
    local: LocalTraining | LocalSettings
    seed: int = 0
    mask: str = "none"
    pretrain: LocalTraining | LocalSettings | None = None
    participation: float = 1.0
    weighting: str = "samples"
    weight_cap: float = DEFAULT_WEIGHT_CAP
    norm_screen: bool = True
    min_contributors: int = 1
    evaluate_every: int = 1
    count: Literal["train", "all"] = "train"
    protocol: Protocol = "assigned"
    segments: tuple[tuple[str, int], ...] = ()
    trainer: str = "auto"
    device: str = "cpu"
    threads: int = 1
    deferred: bool | None = None
    norms: bool = False
    checkpoint: Path | None = None
    arrivals: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimRound:
    """A closed round in figures.

    Attributes:
        round: counted; plan_round: the strategy's own number.
        loss: mean of what devices report, weighted by samples; NaN where nobody reports.
        accuracy: percent by the run's protocol, None where not evaluated; median: over devices, percent.
        purity, ari: against the true groups; None where there are none.
        clusters: that have members; sizes: theirs, largest first.
        norms: mean and largest l2 norm of the round's updates, None where they are not known.
        capped, refused_norm: as in `aggregator.rounds.events.RoundRecord`.
        seconds_cpu: of planning, training and closing; evaluation comes on top and is not counted.
    """

    round: int
    plan_round: int
    loss: float
    seconds_cpu: float
    norms: tuple[float, float] | None
    events: tuple[Event, ...]
    clusters: int = 0
    sizes: tuple[int, ...] = ()
    accuracy: float | None = None
    median: float | None = None
    purity: float | None = None
    ari: float | None = None
    capped: Mapping[str, float] = field(default_factory=dict)
    refused_norm: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of an experiment's history as JSON."""
        return {"round": self.round, "accuracy": self.accuracy, "loss": self.loss, "purity": self.purity}
