"""Every message that travels, and the few that are carried as files between owner, devices and aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.codec import U16, U32, U64, ArrayU16, ArrayU32, Fixed16, Fixed32, message
from shoal.protocol.documents import require_name

NO_ASSIGNMENT: Final = 0xFFFF
NO_TRANSFER: Final = bytes(16)
SHARED_MODEL: Final = 0xFFFF
"""Stands in place of a model's id where weight sharing sends what all models have in common."""
CARRIED_FIRST: Final = 0xE000
"""From here on a model's id stands for a masked vector that is no model."""
PROPOSAL_MODEL: Final = 0xFFFE
"""Stands in place of a model's id where a checkpoint travels for the devices to compare with their own."""


class Phase(IntEnum):
    """What a device's work in a round is for; part of an upload's identity.

    PRETRAIN trains by the plan's own recipe; KEEP reports on the first candidate and keeps all of them. CHECKPOINT and
    ENDORSE end a mask epoch: one device folds all models into new origins, then all compare and sign.
    """

    TRAIN = 1
    TRIAL = 2
    SCORE = 3
    CHECKPOINT = 4
    PRETRAIN = 5
    KEEP = 6
    ENDORSE = 7


class Share(IntEnum):
    """Which part of a device's own data is scored."""

    TRAIN = 1
    VALIDATION = 2
    TEST = 3


class Action(IntEnum):
    """What the aggregator answers to an upload."""

    ACK = 1
    NACK = 2
    REFUSED = 3


class DeclineReason(IntEnum):
    """Why a device can't do its part: all that the aggregator learns of it, the rest stands in the device's own log.

    DATA: its samples are missing or don't fit the task. TASK: training diverged, or its graphs can't run. REFUSED: what it was
    sent is not what it may follow. OTHER: anything else. UPLOAD: what the aggregator itself notes where it has refused the
    device's upload; no device says so. DISK: its disk is full or fails; the device ends.
    """

    DATA = 1
    TASK = 2
    REFUSED = 3
    OTHER = 4
    UPLOAD = 5
    DISK = 6


@message(10)
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Where to find a model's masked offset, or the shared part of all of them.

    Attributes:
        model: id within the run, SHARED_MODEL for the shared part; origin: which sealed origin it is an offset from.
        label: opaque topic label; transfer: transfer id of the sealed offset, all zero where the offset is still
            zero.
        contributors: fewest devices behind any mean that is in the offset.
        norm: l2 norm of the offset.
        scale: what the origin is multiplied by; 1 but for FedGroup's inter-group aggregation.
    """

    model: U16
    origin: U16
    label: str
    transfer: Fixed16
    contributors: U32
    norm: float
    scale: float = 1.0


@message(11)
@dataclass(frozen=True, slots=True)
class Assignment:
    """What some devices do in a round: score the candidates on a share, take the best, train and evaluate it, report.

    Attributes:
        share: what candidates are scored on.
        margins: report each candidate's loss less the first candidate's, clipped and rounded.
        train: upload a masked update; evaluate: report accuracy on the test share.
        norm: report the l2 norm of the trained model.
        keep: round whose update of its own the device keeps, for later mask epochs; 0 is none.
        renew: rounds whose updates of its own the device masks anew, in a round of phase ENDORSE.
    """

    phase: Phase
    candidates: ArrayU16
    share: Share
    train: bool
    evaluate: bool
    margins: bool
    norm: bool = False
    keep: U32 = 0
    renew: ArrayU32 = ()

    def __post_init__(self) -> None:
        if not self.candidates:
            raise WireError("an order without a model")


@message(12)
@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The open round, retained: models, orders, and each device's order by its place in the roster.

    Attributes:
        mode: the mask mode, which must be the plan's.
        step: 0 in a round; 1 and more in the steps of a rollover that follows it.
        shared: with weight sharing, the ``shared`` segment of every model; ``models`` then are ``cluster`` segments.
        carried: in a rollover, masked vectors that are no models, for the device that folds to mask anew.
        generation: in a rollover, the roster sequence of the secrets that the next mask epoch is made with.
        proposal: where to find the checkpoint to compare with and sign.
        remind_after_s: earliest reminder of an upload of this round that was not answered; grows with the fleet.
        package_bytes: of the sealed run package at the plan's topic; 0 if not given.
        epoch_bytes: of the sealed mask epoch at the checkpoint's topic, 0 if there is none.
    """

    fleet: str
    run: U32
    run_id: Fixed16
    epoch: U32
    key_id: Fixed16
    roster_sequence: U32
    round: U32
    nonce: Fixed16
    deadline_s: float
    finished: bool
    models: tuple[ModelRef, ...]
    assignments: tuple[Assignment, ...]
    assignment_of: ArrayU16
    mode: str
    shared: ModelRef | None = None
    step: U32 = 0
    carried: tuple[ModelRef, ...] = ()
    generation: U32 = 0
    proposal: ModelRef | None = None
    remind_after_s: float = limits.REMIND_BASE_S
    package_bytes: U64 = 0
    epoch_bytes: U64 = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """Run, round and step, which only grow."""
        return (self.run, self.round, self.step)

    def order_for(self, index: int) -> Assignment | None:
        """Return the order of the device at ``index`` in the roster, or None where it has none this round."""
        if index >= len(self.assignment_of) or self.assignment_of[index] == NO_ASSIGNMENT:
            return None
        if self.assignment_of[index] >= len(self.assignments):
            raise WireError("an announcement points to an order that it does not hold")
        return self.assignments[self.assignment_of[index]]


@message(13)
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeader:
    """In front of a masked offset on its way to devices; (length,) float32 little-endian follows.

    Attributes:
        model: SHARED_MODEL in front of the shared part.
        segment: the plan's segment that follows; empty where the whole vector does.
        scale: as in ModelRef.
    """

    fleet: str
    run_id: Fixed16
    epoch: U32
    key_id: Fixed16
    model: U16
    origin: U16
    round: U32
    length: U32
    segment: str = ""
    scale: float = 1.0


@message(14)
@dataclass(frozen=True, slots=True)
class Upload:
    """Goes with a device's masked update, (length,) float32 little-endian, or with nothing where length is 0.

    Attributes:
        nonce: the announcement's, so that an upload answers one round only.
        model: the chosen candidate, from which the update was trained.
        loss: mean loss of that model on the share: as scored where there were several candidates or nothing to train,
            else the mean over the training just done.
        margins: each candidate's loss less the first candidate's, clipped and rounded, where the order asked for it.
        samples: trained on; 1 where the plan's weighting is uniform.
        correct, tested: of the test share, in percent where the plan's weighting is uniform, where the order asked for it.
        model_norm: l2 norm of the trained model, rounded, where the order asked for it, else 0.
        attached: bytes that follow the update: a `shoal.protocol.epochs.Proposal` or `Endorsement` and what goes with it.
    """

    fleet: str
    run: U32
    run_id: Fixed16
    epoch: U32
    round: U32
    phase: Phase
    nonce: Fixed16
    device: str
    recipient: Fixed32
    task_digest: Fixed32
    mode: str
    key_id: Fixed16
    model: U16
    samples: U32
    loss: float
    margins: tuple[float, ...]
    correct: U32
    tested: U32
    length: U32
    model_norm: float = 0.0
    attached: U32 = 0

    def __post_init__(self) -> None:
        require_name(self.device, "device name")


@message(15)
@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The aggregator's answer to one device's upload."""

    fleet: str
    device: str
    action: Action
    run: U32
    round: U32
    transfer: Fixed16
    missing: ArrayU32
    reason: str


@message(16)
@dataclass(frozen=True, slots=True)
class Presence:
    """A device's retained state; the will is the offline form with the same birth number."""

    fleet: str
    device: str
    birth: U64
    online: bool


@message(17)
@dataclass(frozen=True, slots=True)
class Sealed:
    """The clear head of every sealed message, bound into the seal and the signature.

    Attributes:
        purpose: what it is, e.g. ``announcement``; sender: member name; recipient: member name or ``*`` for the
            fleet.
    """

    fleet: str
    purpose: str
    sender: str
    recipient: str


@message(24)
@dataclass(frozen=True, slots=True)
class Decline:
    """A device tells the aggregator that no upload of its own will come for what was announced with ``nonce``."""

    fleet: str
    device: str
    run_id: Fixed16
    nonce: Fixed16
    reason: DeclineReason

    def __post_init__(self) -> None:
        if self.reason == DeclineReason.UPLOAD:
            raise WireError("no device says that its upload was refused")


@message(25)
@dataclass(frozen=True, slots=True, kw_only=True)
class Reminder:
    """A device reminds the aggregator of an upload that was not answered.

    Attributes:
        transfer: its name; digest: what its signature is over; size: its bytes; chunk_bytes: of its chunks.
        turn: grows when the device sends what it was asked for, when it connects, and with each of its lives.
    """

    fleet: str
    device: str
    run_id: Fixed16
    round: U32
    transfer: Fixed16
    digest: Fixed32
    size: U64
    chunk_bytes: U32
    turn: U64

    def __post_init__(self) -> None:
        if not 1 <= self.size <= limits.MAX_TRANSFER_BYTES or not 1 <= self.chunk_bytes <= limits.MAX_PACKET_BYTES:
            raise WireError(f"a reminder of {self.size} bytes in chunks of {self.chunk_bytes}")
