"""What happens to a run and what has to be done about it: the values that the engine takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aggregator.strategies.base import Contribution, RoundPlan, UploadKey
from shoal.protocol.documents import Roster
from shoal.protocol.epochs import Certificate
from shoal.protocol.messages import Obstacle


@dataclass(frozen=True, slots=True)
class CameOnline:
    """A device's presence says it is there."""

    device: str


@dataclass(frozen=True, slots=True)
class WentOffline:
    """A device's presence, or its will, says it is gone."""

    device: str


@dataclass(frozen=True, slots=True)
class Left:
    """The owner revoked a device: nobody waits for it any more."""

    device: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A device says that it can't do its part in the round, or the step of a rollover, that was announced with ``nonce``."""

    device: str
    nonce: bytes
    obstacle: Obstacle


@dataclass(frozen=True, slots=True)
class Stored:
    """An upload that `Engine.judge` let pass is durable."""

    contribution: Contribution
    digest: bytes


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time that the plan gives a round, a step of a rollover, or the gathering after either is over."""

    round: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Rostered:
    """The owner's newest roster; ``data`` is the same as the owner signed it."""

    roster: Roster
    data: bytes


@dataclass(frozen=True, slots=True)
class KeysHeld:
    """Secrets that were drawn at roster ``generation`` are at hand: a run under older ones rolls over to these."""

    generation: int


Event = CameOnline | WentOffline | Left | Declined | Stored | DeadlinePassed | Rostered | KeysHeld


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait for devices; feed `DeadlinePassed` with the state's round and step after the plan's deadline."""


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Make ``before`` durable, then announce ``plan``, or the other way round: see `RunService`.

    Attributes:
        before: the strategy's state from which, with ``available``, the same plan follows again.
        generation: in a rollover, of the secrets that the next mask epoch is made with.
        proposal: in its second step, what devices compare with their own: an encoded `Checkpoint` and the sealed origins.
    """

    plan: RoundPlan
    nonce: bytes
    before: Any
    available: tuple[str, ...]
    generation: int = 0
    proposal: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """A round is over: what it brought."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The final round is closed: there is nothing left to do."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """A mask epoch has begun: make it durable, publish it, then erase all that is masked under the key before.

    Attributes:
        round: the round that it follows.
        certificate, sealed: for the devices.
        state: the strategy's, in the new epoch; standing: the engine's, with no round open.
        own: what devices have masked anew, by the uploads they were.
    """

    round: int
    certificate: Certificate
    sealed: bytes = field(repr=False)
    state: Any
    standing: Mapping[str, Any]
    own: Mapping[UploadKey, Contribution]


@dataclass(frozen=True, slots=True)
class RolloverFailed:
    """The old epoch stays for now: forget what was uploaded for the new one."""

    round: int
    reason: str


Action = Gather | OpenRound | RoundClosed | RunFinished | Renewed | RolloverFailed


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A closed round in figures.

    Attributes:
        ordered, contributed: devices that were asked and that answered; missing: those that did not; declined: why, for
            those of them that said so.
        loss: mean of the devices' losses on the scored share, weighted by samples.
        correct, tested: over the devices' test shares; 0 of 0 where nobody was asked.
        norms: each contributor's update norm; clusters: every device's cluster after the round.
        device_accuracy: (correct, tested) of each contributor that was asked for it.
        capped: device -> weight in samples, of contributors that weighed less than the samples they reported.
        refused_norm: device -> norm, of contributors whose update was left out because of its norm.
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
