"""The engine's events and actions: `Engine.handle` takes an event and returns actions for the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aggregator.rounds.cosines import Cosines
from aggregator.rounds.held_models import HeldModels
from aggregator.rounds.orders import Order
from aggregator.rounds.standstill import StillCluster
from aggregator.strategies.base import ClientUpdate, RoundPlan
from shoal.protocol.documents import Roster
from shoal.protocol.messages import DeclineReason


@dataclass(frozen=True, slots=True)
class CameOnline:
    """A device announced that it is online."""

    device: str


@dataclass(frozen=True, slots=True)
class WentOffline:
    """A device, or its last will, announced that it is offline."""

    device: str


@dataclass(frozen=True, slots=True)
class Left:
    """The owner revoked a device."""

    device: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A device can't take part in the round that was announced with ``nonce``, or its upload was refused.

    Attributes:
        other: the transcript in the statement of a refused upload, if it is not the run's; else empty.
    """

    device: str
    nonce: bytes
    reason: DeclineReason
    other: bytes = b""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of a round, or of the gathering after it, has passed."""

    round: int


@dataclass(frozen=True, slots=True)
class Rostered:
    """The owner published a newer roster."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class KeysHeld:
    """The secrets of key version ``version`` are available; the next round uses them if they are the newest."""

    version: int


@dataclass(frozen=True, slots=True)
class Ordered:
    """The owner pauses, resumes or stops the run; the driver has made the order durable."""

    order: Order


Event = CameOnline | WentOffline | Left | Declined | ClientUpdate | DeadlinePassed | Rostered | KeysHeld | Ordered
"""A `ClientUpdate` is an upload that `Engine.validate` accepted and that is durable."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait for devices; feed `DeadlinePassed` with the state's round after the plan's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """Make ``before`` durable and announce ``plan``; `RunService` decides which comes first.

    Attributes:
        plan: the round's plan.
        nonce: an upload to the round must repeat it.
        before: the strategy's state from which, with ``available``, the same plan follows again.
        available: the devices that could take part.
        held: the models to announce, from which, with ``before``, the round follows again.
    """

    plan: RoundPlan
    nonce: bytes
    before: Any
    available: tuple[str, ...]
    held: HeldModels


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Record a closed round."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class RunFinished:
    """End the run: the final round is closed.

    Attributes:
        last: the final round with its checkpoints, to be announced again and made durable.
    """

    last: OpenRound


Action = Gather | OpenRound | RoundClosed | RunFinished


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The record of a closed round.

    Attributes:
        round: its number.
        final: whether it was the final round.
        ordered: number of devices with an order.
        contributed: number of devices that uploaded.
        missing: the devices with an order that did not upload.
        loss: mean of the devices' losses on the scored share, weighted by samples; of five or more the smallest and the largest
            count as their neighbours.
        correct, tested: sums over the devices' test shares, each of at most the plan's weight cap times the median; 0 of 0 if no
            device was asked.
        norms: device -> norm of its update.
        clusters: device -> cluster after the round.
        events: the strategy's and the engine's events.
        device_accuracy: device -> (correct, tested), capped in proportion, for the devices that were asked.
        declined: device -> reason, for the missing devices that gave one.
        capped: device -> weight in samples, for devices that weighed less than the samples they reported.
        refused_norm: device -> norm, for updates left out because of their norm.
        out_of_step: device -> model, for updates left out because most devices hold another state of the model.
        cluster_losses: cluster -> mean loss, as ``loss``, of the devices that are in it after the round.
        still: the clusters whose model has not changed for some rounds, see `aggregator.rounds.standstill`.
        cluster_tests: cluster -> (correct, tested), sums over the test shares of the devices that are in it after the round.
        cosines: between the round's updates; None without two of them.
    """

    round: int
    final: bool
    ordered: int
    contributed: int
    missing: tuple[str, ...]
    loss: float
    correct: int
    tested: int
    norms: Mapping[str, float]
    clusters: Mapping[str, int]
    events: tuple[Mapping[str, Any], ...]
    device_accuracy: Mapping[str, tuple[int, int]]
    declined: Mapping[str, str] = field(default_factory=dict)
    capped: Mapping[str, float] = field(default_factory=dict)
    refused_norm: Mapping[str, float] = field(default_factory=dict)
    out_of_step: Mapping[str, int] = field(default_factory=dict)
    still: tuple[StillCluster, ...] = ()
    cluster_losses: Mapping[int, float] = field(default_factory=dict)
    cluster_tests: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    cosines: Cosines | None = None
