"""Options of a simulated run, and the record of a closed round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from aggregator.strategies.base import Event
from shoal.protocol.recipe import Recipe
from shoal.simulation.engine.evaluation import Protocol

UNLIMITED_NORM: Final = 1e9
"""A limit on norms that no update reaches."""


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of a simulated run, besides strategy, data and network. Unlike a fleet it measures accuracy after every round.

    Attributes:
        recipe: as an owner chooses it. ``rounds`` are counted ones (see ``count``); those of IFCA's abandoned starts don't count.
            The seed is that of origins and of the mask as well.
        norm_screen: leave out updates that `aggregator.rounds.screening` refuses. The papers have no such rule.
        evaluate_every: counted rounds between two evaluations; 0 evaluates at the end only. The recipe's is not read.
        count: "train" counts rounds in which a device trains in phase TRAIN, "all" counts every round.
        protocol: how accuracy is measured, see `evaluation.evaluate`.
        segments: names and lengths in the order of theta if weights are shared; one ``cluster`` segment if empty.
        trainer, device, deferred, norms: see `workforce.Workforce`; norms are also computed if one of the limits needs them.
        threads: threads of one matrix product.
        checkpoint: a file to which the run is saved every minute, and from which it resumes if the file exists.
        arrivals: device -> the first round, counted or not, in which it can take part; the strategy does not know it before.
            Other devices take part from round 1.
    """

    recipe: Recipe
    norm_screen: bool = True
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
        loss: mean of the reported losses, weighted by samples; None if no device reports.
        accuracy: percent by the run's protocol, None if not evaluated; median: over devices, percent.
        test_loss: mean over all test samples; None if not evaluated.
        purity, ari: against the true groups; None if there are none.
        clusters: number of clusters with members; sizes: their sizes, largest first.
        norms: mean and largest l2 norm of the round's updates; None if they are not known.
        capped, refused_norm: as in `aggregator.rounds.state.RoundRecord`.
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
