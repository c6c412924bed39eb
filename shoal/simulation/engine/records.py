"""Options of a simulated run, and the record of a closed round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from aggregator.strategies.base import Event
from shoal.owner.runs import defaults
from shoal.protocol.documents import LocalSettings
from shoal.simulation.engine.evaluation import Protocol
from shoal.task.manifest import LocalTraining

UNLIMITED_NORM: Final = 1e9
"""A limit on norms that no update reaches."""


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of a simulated run, besides strategy, data and network.

    Participation, weights, limits and the smallest mean are a fleet's unless given (`shoal.owner.runs.defaults`). A simulated run
    has no mask unless asked, since a mask changes no result, and measures accuracy after every round.

    Attributes:
        rounds: number of counted rounds (see ``count``); those of IFCA's abandoned starts don't count.
        seed: seed of origins, participation, batch orders and the mask.
        mask: a mask mode of `crypto.mask.modes.registry`, or "none"; each round has a mask of its own.
        local: recipe of local training; pretrain: recipe of phase PRETRAIN, ``local`` if None.
        participation: share of the devices drawn for a round; weighting: "samples" or "uniform".
        weight_cap, robust: as in `RunPlan`; norm_screen: leave out updates that `aggregator.rounds.screening` refuses. The papers
            have none of these.
        norm_limit: largest l2 norm of an update; longer ones are left out.
        precision_up, precision_down: as in `RunPlan`; each update is stored unless the first is float32.
        min_contributors: fewest devices in a mean.
        evaluate_every: counted rounds between two evaluations; 0 evaluates at the end only.
        count: "train" counts rounds in which a device trains in phase TRAIN, "all" counts every round.
        protocol: how accuracy is measured, see `evaluation.evaluate`.
        segments: names and lengths in the order of theta if weights are shared; one ``cluster`` segment if empty.
        trainer, device, deferred, norms: see `workforce.Workforce`; norms are also computed if one of the limits needs them.
        threads: threads of one matrix product.
        checkpoint: a file to which the run is saved every minute, and from which it resumes if the file exists.
        arrivals: device -> the first round, counted or not, in which it can take part; the strategy does not know it before.
            Other devices take part from round 1.
    """

    rounds: int
    local: LocalTraining | LocalSettings
    seed: int = 0
    mask: str = "none"
    pretrain: LocalTraining | LocalSettings | None = None
    participation: float = defaults.DEFAULT_PARTICIPATION
    weighting: str = defaults.DEFAULT_WEIGHTING
    weight_cap: float = defaults.DEFAULT_WEIGHT_CAP
    robust: str = defaults.DEFAULT_ROBUST
    norm_screen: bool = True
    norm_limit: float = defaults.DEFAULT_NORM_LIMIT
    precision_up: str = defaults.DEFAULT_PRECISION_UP
    precision_down: str = defaults.DEFAULT_PRECISION_DOWN
    min_contributors: int = defaults.DEFAULT_MIN_CONTRIBUTORS
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

    @property
    def limits_norms(self) -> bool:
        """Whether an update may be left out for its norm."""
        return self.norm_screen or self.norm_limit < UNLIMITED_NORM


@dataclass(frozen=True, slots=True)
class SimRound:
    """A closed round in figures.

    Attributes:
        round: counted; plan_round: the strategy's own number.
        loss: mean of the reported losses, weighted by samples; None if no device reports.
        accuracy: percent by the run's protocol, None if not evaluated; median: over devices, percent.
        test_loss: mean over all test samples; None if not evaluated.
        purity, ari: against the true groups; None if there are none.
        clusters: number of clusters with members; sizes: their sizes, largest first.
        norms: mean and largest l2 norm of the round's updates; None if they are not known.
        capped, refused_norm: as in `aggregator.rounds.events.RoundRecord`.
        seconds_cpu: CPU time of planning, training and closing, without evaluation.
    """

    round: int
    plan_round: int
    loss: float | None
    seconds_cpu: float
    norms: tuple[float, float] | None
    events: tuple[Event, ...]
    clusters: int = 0
    sizes: tuple[int, ...] = ()
    accuracy: float | None = None
    median: float | None = None
    test_loss: float | None = None
    purity: float | None = None
    ari: float | None = None
    capped: Mapping[str, float] = field(default_factory=dict)
    refused_norm: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of an experiment's history as JSON."""
        return {"round": self.round, "accuracy": self.accuracy, "loss": self.loss, "purity": self.purity}
