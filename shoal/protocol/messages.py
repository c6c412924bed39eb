"""Messages of a round: announcement, uploads, declines, reminders, presence, and the head of every envelope.

Example: an aggregator retains an `Announcement` with round 3 and a nonce. A device finds its `Assignment` with `order_for`,
trains, and sends an `Upload` with the same nonce; the aggregator answers with a `Control` of action ACK. Without an answer
the device sends a `Reminder`; if it can't do its part it sends a `Decline`.

Documents of membership and runs are in `shoal.protocol.documents`, messages about models in `shoal.protocol.states`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.codec import U8, U16, U32, U64, ArrayU16, ArrayU32, Fixed16, Fixed32, LaterFields, message
from shoal.protocol.documents import require_name
from shoal.protocol.states import RoundModels, TranscriptHead
from shoal.version import WIRE

NO_ASSIGNMENT: Final = 0xFFFF
FULL_PERCENT: Final = 100
TRIAL_MARGINS: Final = 3
"""Margins of an upload in phase ADAPT, see `Upload`."""
MOST_CONTRARY: Final = 3
"""Most names in a presence of devices that have signed another history or state."""
SHARED_MODEL: Final = 0xFFFF
"""In place of a model's id: under weight sharing, the segment that all models share."""
STATISTICS_MODEL: Final = limits.MAX_MODELS - 1
"""Id of the model that is the fleet's mean of statistics (`edge_client.learning.statistics`)."""
STATISTICS_MODELS: Final = range(STATISTICS_MODEL, limits.MAX_MODELS + limits.MAX_SCALED)
"""Ids of the models that are means of statistics: the fleet's, then those of clusters (`statistics_model`)."""
FOR_ALL: Final = frozenset({SHARED_MODEL, *STATISTICS_MODELS})
"""Models that every device needs in each round that offers them."""


def statistics_model(model: int) -> int:
    """Return the id of the model that is the mean of statistics of the devices of ``model``, below `limits.MAX_SCALED`."""
    return limits.MAX_MODELS + model


class Phase(IntEnum):
    """The kind of work in a round; part of an upload's identity.

    TRIAL trains the first candidate and holds the others, to score them later. ADAPT trains both candidates,
    uploads the first one's update, and reports margins of the models before and after. PRETRAIN trains by the plan's ``pretrain``
    recipe; KEEP reports on the first candidate and stores all of them. PLACE trains
    the only candidate by the ``pretrain`` recipe, uploads no update, and reports which of the models to compare with lies most
    nearly in the direction of the update. STATISTICS uploads how the device's statistics of its features differ from those that
    the first candidate is, in place of an update, and holds the others.
    """

    TRAIN = 1
    TRIAL = 2
    SCORE = 3
    PRETRAIN = 5
    KEEP = 6
    PLACE = 8
    ADAPT = 9
    STATISTICS = 10


_FIRST_ALONE: Final = (Phase.KEEP, Phase.TRIAL, Phase.ADAPT, Phase.STATISTICS)
"""Phases in which a device holds the other candidates without a choice among them."""


class Share(IntEnum):
    """The share of a device's data on which models are scored."""

    TRAIN = 1
    VALIDATION = 2
    TEST = 3


class Action(IntEnum):
    """The aggregator's answer to an upload: stored, chunks missing, or refused."""

    ACK = 1
    NACK = 2
    REFUSED = 3


class DeclineReason(IntEnum):
    """The kind of reason why a device can't do its part. Only the device's log has the details.

    DATA: samples are missing or don't fit the task. TASK: training diverged, or the task's graphs can't run. REFUSED: the
    device refused the announcement, its assignment or a model. OTHER: anything else. UPLOAD: the aggregator refused the
    device's upload; only the aggregator records it, and no device sends it. DISK: the disk is full or fails; the device's
    program ends. STATE: the device lacks the state of a model, and waits for a checkpoint. KEYS: the round is under keys that
    the owner has replaced, and the device waits for one under the newer keys. METERED: the device's link costs money at this
    time of day. TRAINER: the device has not the task's own training code, or that has failed. SUM: a mean is no sum of
    its round's updates, in a run with a keeper.
    """

    DATA = 1
    TASK = 2
    REFUSED = 3
    OTHER = 4
    UPLOAD = 5
    DISK = 6
    STATE = 7
    KEYS = 8
    TRAINER = 9
    METERED = 10
    SUM = 11


@message(11)
@dataclass(frozen=True, slots=True)
class Assignment:
    """Work of some devices in a round: score the candidates, choose the best, then train, evaluate and report.

    Attributes:
        share: data on which candidates are scored.
        margins: report each candidate's loss less the first candidate's, clipped and rounded.
        train: upload a masked update; evaluate: report accuracy on the test share.
        norm: report the l2 norm of the trained model.
        seal: offered models, in ascending order, of which the device attaches a checkpoint to its upload.
        compare: offered models, in ascending order; the device reports which is nearest to the model that it has trained, by
            distance or, in phase PLACE, by direction.
    """

    phase: Phase
    candidates: ArrayU16
    share: Share
    train: bool
    evaluate: bool
    margins: bool
    norm: bool = False
    seal: ArrayU16 = ()
    compare: ArrayU16 = ()

    def __post_init__(self) -> None:
        if not self.candidates:
            raise WireError("an order without a model")

    @property
    def scored(self) -> tuple[int, ...]:
        """The candidates among which the device chooses: all of them, but the first alone where the others serve another end."""
        return self.candidates[:1] if self.phase in _FIRST_ALONE else self.candidates

    @property
    def models(self) -> tuple[int, ...]:
        """All models that the work needs, each once: the candidates, then those to compare with."""
        return tuple(dict.fromkeys((*self.candidates, *self.compare)))

    @property
    def figures(self) -> int:
        """How many margins its upload has: one for each candidate, or those of a trial (`TRIAL_MARGINS`)."""
        return 0 if not self.margins else TRIAL_MARGINS if self.train else len(self.candidates)

    @property
    def trains(self) -> bool:
        """Whether the device trains, with or without an upload of its update."""
        return self.train or self.phase == Phase.PLACE


@message(38)
@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The open round, retained on the broker: the models, the assignments, and the assignment of each roster index.

    Attributes:
        assignment_of: for each roster index, an index into ``assignments`` or NO_ASSIGNMENT.
        held: the models, which devices hold.
        remind_after_s: time to the first reminder of an unacknowledged upload of this round; grows with the fleet.
        package_bytes: size of the sealed run package at the plan's topic; 0 if not given.
        unit: step of the 16-bit numbers in which updates are added up (`crypto.sums.ring.short`); 0 for 32 bits in the plan's
            step, and in a run without a keeper.
    """

    fleet: str
    run: U32
    run_id: Fixed16
    roster_sequence: U32
    round: U32
    nonce: Fixed16
    deadline_s: float
    finished: bool
    assignments: tuple[Assignment, ...]
    assignment_of: ArrayU16
    held: RoundModels
    remind_after_s: float = limits.REMIND_BASE_S
    package_bytes: U64 = 0
    unit: float = 0.0
    later: LaterFields = ()

    @property
    def place(self) -> tuple[int, int]:
        """Run and round; devices refuse an announcement whose place is lower than one they accepted."""
        return (self.run, self.round)

    def order_for(self, index: int) -> Assignment | None:
        """Return the assignment of the device at ``index`` in the roster, or None if it has none this round.

        Raises:
            WireError: the announcement refers to an assignment that it does not contain.
        """
        # A device that joined after the announcement has no entry in it yet.
        if index >= len(self.assignment_of) or self.assignment_of[index] == NO_ASSIGNMENT:
            return None
        if self.assignment_of[index] >= len(self.assignments):
            raise WireError("an announcement points to an order that it does not hold")
        return self.assignments[self.assignment_of[index]]


@message(155)
@dataclass(frozen=True, slots=True)
class Upload:
    """Header of a device's masked update of ``length`` coordinates in the plan's precision, which is empty if length is 0.

    Attributes:
        nonce: the announcement's, so that an upload is valid for one round only.
        model: the chosen candidate, from which the update was trained.
        loss: mean loss of that model on the share as scored, if there were several candidates or nothing to train; else
            the mean over the training.
        margins: each candidate's loss less the first candidate's, clipped and rounded; empty unless assigned. In phase ADAPT
            there are TRIAL_MARGINS of the second candidate: the lesser of its means over samples and over labels before
            training, the lesser of those over samples before and after training, and the mean over labels before training.
        samples: number of samples trained on; 1 if the plan's weighting is uniform.
        correct, tested: counts on the test share, in percent if the plan's weighting is uniform; 0 unless assigned.
        model_norm: l2 norm of the trained model, rounded; 0 unless assigned.
        attached: bytes that follow the update: a `shoal.protocol.states.SealedCheckpoints` with its envelopes, if there are
            any.
        key_version: the version of the round's keys.
        statement: the device's signed `shoal.protocol.states.Statement` about the states that it holds.
        nearest: of the assigned models, the one at the least l2 distance from the trained model; at a tie the model that it
            was trained from, else the smallest id. In phase PLACE the one whose difference from the candidate has the largest
            cosine with the update; at a tie the smallest id. 0 unless assigned.
        precision: encoding of the update, the plan's ``precision_up``; with a keeper "float16" stands for numbers of 16 bits.
        parts: in a run with workers, the digest that each part's signature covers, in the order of the workers; the update
            itself does not follow then.
        share: in a run with a keeper, the device's sealed `shoal.protocol.sums.KeeperShare`. Loss, counts and samples above are 0
            then, margins are left out, and the update is fixed-point numbers under a pad (`crypto.sums`), as long as in float32.
        sketch: with an update, in a run with looks: the padded words that a look compares (`crypto.sums.looks`).
        checks: with an update, in a run with a keeper: its padded codes (`crypto.sums.codes`).
    """

    fleet: str
    run: U32
    run_id: Fixed16
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
    key_version: U32 = 0
    statement: bytes = b""
    nearest: U16 = 0
    precision: str = "float32"
    parts: tuple[Fixed32, ...] = ()
    share: bytes = b""
    sketch: bytes = b""
    checks: ArrayU32 = ()
    later: LaterFields = ()

    def __post_init__(self) -> None:
        require_name(self.device, "device name")

    @property
    def coordinates(self) -> int:
        """Number of the update's coordinates that follow the header: none if workers have its parts."""
        return 0 if self.parts else self.length


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
    later: LaterFields = ()


@message(62)
@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """The condition of a device, which its operator lets it report. A figure is None if the device can't measure it.

    Attributes:
        uptime_s: since the machine was started.
        disk_free_bytes: for the device's directory.
        memory_bytes, memory_free_bytes: of the machine; free is what programs can still get.
        load: mean number of runnable processes in the last minute; cores: processor cores.
        temperature_c: of the warmest sensor, degrees Celsius.
        battery_percent: charge, 0 to 100; charging: whether the battery is being charged, or is full.
    """

    uptime_s: U64 | None = None
    disk_free_bytes: U64 | None = None
    memory_bytes: U64 | None = None
    memory_free_bytes: U64 | None = None
    load: float | None = None
    cores: U16 | None = None
    temperature_c: float | None = None
    battery_percent: U8 | None = None
    charging: bool | None = None

    def __post_init__(self) -> None:
        for value in (self.load, self.temperature_c):
            if value is not None and not math.isfinite(value):
                raise WireError(f"a measurement of {value}")
        if self.battery_percent is not None and self.battery_percent > FULL_PERCENT:
            raise WireError(f"a battery at {self.battery_percent} %")


@message(157)
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsHeld:
    """The models of the newest round that a device took part in, of which the next run of a standing order may begin.

    Attributes:
        run, run_id: the run.
        transcript: the run's, after that round; NO_TRANSCRIPT before the first one.
        models: number of models that the round offered. Numbered from 0, they are the origins of the next run.
        own: those that the device holds, ascending.
        grown: whether the device's data have grown since by as much as its order waits for.
    """

    run: U32
    run_id: Fixed16
    transcript: Fixed32
    models: U16
    own: tuple[U16, ...]
    grown: bool = False

    def __post_init__(self) -> None:
        if self.models > limits.MAX_FOLLOWED_MODELS or any(a >= b for a, b in pairwise((-1, *self.own, self.models))):
            raise WireError(f"{len(self.own)} of {self.models} models held")


@message(154)
@dataclass(frozen=True, slots=True)
class Presence:
    """A device's retained state, online or offline; its will is the offline form with the same incarnation (``birth``).

    Attributes:
        version: of the device's software, such as ``0.1.0``.
        sent_at_s: unix seconds by the device's clock when the message was made; of a will, when the device started.
        head: the history of the run that the device follows; None before its first round, and in the will.
        answers: number of the run whose finished model the device answers with; 0 before its first, and in the will.
        vitals: the device's condition, if its operator lets it report that; None in the will.
        wire: the wire version that the device's software speaks.
        left_out: number of damaged samples that the device leaves out.
        contrary: devices that have signed another history or state: at most MOST_CONTRARY names, for the owner to read.
        rival: birth of a later program that uses the device's identity, and is to end; 0 for none.
        doubted: whether the device's model is right no more often than its most common label.
        held: the models that the device could begin the next run of a standing order with; None in the will.
    """

    fleet: str
    device: str
    birth: U64
    online: bool
    version: str = ""
    sent_at_s: U64 = 0
    head: TranscriptHead | None = None
    answers: U32 = 0
    vitals: Vitals | None = None
    wire: U16 = WIRE
    left_out: U32 = 0
    contrary: tuple[str, ...] = ()
    rival: U64 = 0
    doubted: bool = False
    held: ModelsHeld | None = None
    later: LaterFields = ()

    def __post_init__(self) -> None:
        if len(self.contrary) > MOST_CONTRARY:
            raise WireError(f"a presence that names {len(self.contrary)} other devices")


class RunOrder(IntEnum):
    """The owner's order for a run, as devices are told."""

    NONE = 1
    PAUSED = 2
    STOPPED = 3


ORDER_WORDS: Final[Mapping[RunOrder, str]] = MappingProxyType(
    {RunOrder.NONE: "", RunOrder.PAUSED: "paused by the owner", RunOrder.STOPPED: "stopped by the owner"}
)
"""The words of each order in status, logs and records; empty for a run that goes on."""


@message(61)
@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The owner's orders in force, retained for all devices by the aggregator that obeys them.

    Attributes:
        sequence: number of the owner's last request that the aggregator has accepted; an older notice has no effect.
        sent_at_s: unix seconds by the aggregator's clock. The message may be retained for long: a device whose clock is behind
            it is wrong, or the aggregator is.
        run, run_id: the run that is served; 0 and zeros if none is.
        order: of the owner for that run.
        choice: the owner's newest signed `ModelChoice`; empty without one.
    """

    fleet: str
    sequence: U64
    sent_at_s: U64
    run: U32
    run_id: Fixed16
    order: RunOrder
    choice: bytes
    later: LaterFields = ()


@message(17)
@dataclass(frozen=True, slots=True)
class Sealed:
    """The readable head of every envelope, bound into its seal and its signature.

    Attributes:
        purpose: the kind of message, e.g. ``announcement``; sender: member name; recipient: member name or ``*`` for
            the fleet.
    """

    fleet: str
    purpose: str
    sender: str
    recipient: str


@message(24)
@dataclass(frozen=True, slots=True)
class Decline:
    """A device's notice that it will send no upload for the announcement with ``nonce``.

    Attributes:
        model: with reason SUM, the one whose mean it is.
    """

    fleet: str
    device: str
    run_id: Fixed16
    nonce: Fixed16
    reason: DeclineReason
    model: U16 = 0
    later: LaterFields = ()

    def __post_init__(self) -> None:
        # Only the aggregator records this reason.
        if self.reason == DeclineReason.UPLOAD:
            raise WireError("no device says that its upload was refused")


@message(25)
@dataclass(frozen=True, slots=True, kw_only=True)
class Reminder:
    """A device's question about an upload that was not acknowledged.

    Attributes:
        transfer: the upload's transfer id; digest: the digest that its signature covers; size: its bytes.
        chunk_bytes: payload bytes of its chunks.
        turn: retransmission counter: grows with each retransmission, connection and start of the device's program.
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
    later: LaterFields = ()

    def __post_init__(self) -> None:
        if not 1 <= self.size <= limits.MAX_TRANSFER_BYTES or not 1 <= self.chunk_bytes <= limits.MAX_PACKET_BYTES:
            raise WireError(f"a reminder of {self.size} bytes in chunks of {self.chunk_bytes}")
