"""The engine's events and actions: `Engine.handle` takes an event and returns actions for the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aggregator.rounds.held_models import HeldModels
from aggregator.rounds.resume import ResumeMetadata
from aggregator.strategies.base import ClientUpdate, RoundPlan, UploadKey
from shoal.protocol.documents import Roster
from shoal.protocol.epochs import Certificate
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
    """A device can't take part in the round, or in the step of a rollover, that was announced with ``nonce``."""

    device: str
    nonce: bytes
    reason: DeclineReason


@dataclass(frozen=True, slots=True)
class Stored:
    """An upload that `Engine.validate` accepted is durable."""

    contribution: ClientUpdate
    digest: bytes


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of a round, of a step of a rollover, or of the gathering after either has passed."""

    round: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Rostered:
    """The owner published a newer roster; ``data`` is its signed form."""

    roster: Roster
    data: bytes


@dataclass(frozen=True, slots=True)
class KeysHeld:
    """Secrets of key version ``generation`` are available; a run under older ones rolls over to them."""

    generation: int


Event = CameOnline | WentOffline | Left | Declined | Stored | DeadlinePassed | Rostered | KeysHeld


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait for devices; feed `DeadlinePassed` with the state's round and step after the plan's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """Make ``before`` durable and announce ``plan``; `RunService` decides which comes first.

    Attributes:
        plan: the round's plan.
        nonce: an upload to the round must repeat it.
        before: the strategy's state from which, with ``available``, the same plan follows again.
        available: the devices that could take part.
        generation: in a rollover, the key version of the next mask epoch.
        proposal: in the second step of a rollover, an encoded `Checkpoint` and the sealed origins, for devices to compare.
        held: under round keys, the models to announce, from which, with ``before``, the round follows again.
    """

    plan: RoundPlan
    nonce: bytes
    before: Any
    available: tuple[str, ...]
    generation: int = 0
    proposal: bytes = field(default=b"", repr=False)
    held: HeldModels | None = None


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Record a closed round."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class RunFinished:
    """End the run: the final round is closed.

    Attributes:
        last: under round keys, the final round with its checkpoints, to be announced again and made durable.
    """

    last: OpenRound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Make a new mask epoch durable, publish it, then erase everything masked under the previous key.

    Attributes:
        round: the round after which it begins.
        certificate, sealed: the proof and the sealed origins for the devices.
        state: the strategy's state in the new epoch.
        metadata: `EngineState.resume_metadata` with no round open.
        own: earlier upload -> the same update masked under the new key.
    """

    round: int
    certificate: Certificate
    sealed: bytes = field(repr=False)
    state: Any
    metadata: ResumeMetadata
    own: Mapping[UploadKey, ClientUpdate]


@dataclass(frozen=True, slots=True)
class RolloverFailed:
    """Delete the uploads of a failed rollover; the mask epoch stays."""

    round: int
    reason: str


Action = Gather | OpenRound | RoundClosed | RunFinished | Renewed | RolloverFailed


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The record of a closed round.

    Attributes:
        round: its number.
        final: whether it was the final round.
        ordered: number of devices with an order.
        contributed: number of devices that uploaded.
        missing: the devices with an order that did not upload.
        loss: mean of the devices' losses on the scored share, weighted by samples.
        correct, tested: sums over the devices' test shares; 0 of 0 if no device was asked.
        norms: device -> norm of its update.
        clusters: device -> cluster after the round.
        events: the strategy's and the engine's events.
        device_accuracy: device -> (correct, tested), for the devices that were asked.
        declined: device -> reason, for the missing devices that gave one.
        capped: device -> weight in samples, for devices that weighed less than the samples they reported.
        refused_norm: device -> norm, for updates left out because of their norm.
        out_of_step: device -> model, for updates left out because most devices hold another state of the model.
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
