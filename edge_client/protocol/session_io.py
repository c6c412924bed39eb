"""Inputs and outputs of a device's session: facts, events, actions.

A session (`edge_client.protocol.session`) decides and does nothing else. `Facts` are what it can't know by itself. Events tell
it what happened: a message came, a file was opened, a job ended. Actions are what `edge_client.runtime` carries out in the
order given; the outcome of some comes back as an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crypto.seal.envelope import GroupKey
    from shoal.errors import ShoalError
    from shoal.protocol.documents import RosterChange, RunPlan
    from shoal.protocol.messages import Announcement, DeclineReason
    from shoal.protocol.topics import TopicKind


@dataclass(frozen=True, slots=True)
class RosterFacts:
    """The roster in force.

    Attributes:
        sequence: its number; signature: the owner's, 64 bytes.
        devices: number of active devices.
        until: the time when it expires, as text; expired: whether that has passed.
        listed: whether it lists this device.
    """

    sequence: int
    signature: bytes = field(repr=False)
    devices: int
    until: str = ""
    expired: bool = False
    listed: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """The surroundings of a session at one moment.

    Attributes:
        now_s: monotonic seconds.
        roster: the roster in force.
        group: the broadcast key in use.
        key_version: the newest key version whose secrets the device holds.
        keys_since: the newest key version that it knows of, also if only the roster names it.
        busy: true if publishes are waiting for the broker's acknowledgement. It may be an object that finds out when its truth
            is asked for: the transport asks the kernel, and few decisions need to know.
        jitter: a number from [0, 1), drawn for this moment.
    """

    now_s: float
    roster: RosterFacts
    group: GroupKey
    key_version: int
    keys_since: int
    busy: object = False
    jitter: float = 0.0

    def within(self, longest_s: float) -> float:
        """Return a random time between half of ``longest_s`` seconds from now and all of it."""
        return self.now_s + longest_s * (0.5 + 0.5 * self.jitter)


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ModelTransfer:
    """A mean or a checkpoint that arrived at a topic label, still sealed or masked; content of a message to `receive`."""

    label: str
    transfer: bytes
    plain: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker accepted the connection; messages in flight may be lost."""


@dataclass(frozen=True, slots=True)
class RosterTaken:
    """A roster was adopted or refused.

    Attributes:
        change: the change that it was made from; None for a whole roster.
        replaced: it names another aggregator than the roster before.
    """

    change: RosterChange | None = None
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class KeysTaken:
    """Newer secrets of the owner are stored."""


@dataclass(frozen=True, slots=True)
class RunFollowed:
    """A run is in force.

    Attributes:
        plan: the owner's plan.
        task_bytes: size of its task.
        lost: an upload of the final round was stored before a restart, but the final model is not on disk.
    """

    plan: RunPlan
    task_bytes: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RunStored:
    """The run in force is on disk."""


@dataclass(frozen=True, slots=True)
class RunNeedsCheckpoint:
    """A run was opened that this device can only begin with a checkpoint."""

    plan: RunPlan


@dataclass(frozen=True, slots=True)
class RunForOthers:
    """The owner's run with this id is for devices with a label that this one lacks."""

    run_id: bytes


@dataclass(frozen=True, slots=True)
class RunRefused:
    """A run can't be followed.

    Attributes:
        run_id: its id; empty if its package was not signed by the owner, or older than an earlier one.
        reason: why.
        late: the run that the device can still begin with a checkpoint, if there is one.
    """

    run_id: bytes
    reason: DeclineReason
    late: RunPlan | None = None


@dataclass(frozen=True, slots=True)
class CheckpointLocated:
    """Topic labels of the checkpoint with which the device begins the run of ``announcement``; empty before the first."""

    announcement: Announcement
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundSkipped:
    """The device can't do its part of an announced round."""

    announcement: Announcement
    reason: DeclineReason
    model: int = 0


@dataclass(frozen=True, slots=True)
class DiskFailed:
    """The disk is full or fails: the device's program must end."""


# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line to the device's log; ``level`` is a name of the logging module, in lower case."""

    level: str
    text: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe to a kind of topic; ``label`` is that of a model."""

    kind: TopicKind
    label: str = ""


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """End the subscription, and drop chunks of an unfinished transfer."""

    kind: TopicKind
    label: str = ""


@dataclass(frozen=True, slots=True)
class Resubscribe:
    """Have the broker send its retained messages once more."""

    kind: TopicKind
    label: str = ""


@dataclass(frozen=True, slots=True)
class PublishPresence:
    """Publish, retained, that the device is online."""


@dataclass(frozen=True, slots=True)
class OfferReceivingKeys:
    """Publish, retained, the device's newest receiving keys."""


@dataclass(frozen=True, slots=True)
class SendDecline:
    """Decline an announced round; ``model`` as in `Decline`."""

    announcement: Announcement
    reason: DeclineReason
    model: int = 0


@dataclass(frozen=True, slots=True)
class SendReminder:
    """Send a reminder of the stored upload; ``turn`` is the retransmission counter."""

    run_id: bytes
    turn: int


@dataclass(frozen=True, slots=True)
class AdoptRoster:
    """Check and adopt a roster signed by the owner; answer with `RosterTaken`, also if it is refused."""

    signed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ApplyRosterChange:
    """Apply a change to the roster in force; answer with `RosterTaken`, also if it is refused."""

    change: RosterChange


@dataclass(frozen=True, slots=True)
class TakeGrant:
    """Open and store secrets that the owner has sealed to this device; answer with `KeysTaken` if they are newer."""

    sealed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ResumeRun:
    """Open the run that was followed before a restart, if there is one; answer with `RunFollowed` or `RunRefused`."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Open a run package; answer with `RunFollowed` and `RunStored`, `RunNeedsCheckpoint` or `RunRefused`."""

    package: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class LocateCheckpoint:
    """Find the checkpoint with which the device can begin the run; answer with `CheckpointLocated`."""

    announcement: Announcement


@dataclass(frozen=True, slots=True)
class BeginWithCheckpoint:
    """Begin the run with a checkpoint that arrived; answer as to `OpenRun`."""

    model: ModelTransfer


@dataclass(frozen=True, slots=True)
class TakeModel:
    """Check and open a mean or a checkpoint; answer with `ModelArrived`, or with `RoundSkipped` if it can't be used."""

    model: ModelTransfer


@dataclass(frozen=True, slots=True)
class DropModel:
    """Forget what arrived at a topic label that the device no longer follows."""

    label: str


@dataclass(frozen=True, slots=True)
class TakeNotice:
    """Compare clocks with a notice, and let the model answer that the owner has chosen.

    Attributes:
        sent_at_s: unix seconds by the aggregator's clock when it was published, or later.
        choice: the owner's signed choice of models; empty without a new one.
    """

    sent_at_s: int
    choice: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """Write the status file, unless that has just happened."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Report the message that led here as refused."""

    error: ShoalError


@dataclass(frozen=True, slots=True)
class Stop:
    """End the device's program with the error of its disk."""


Event = (
    Connected
    | RosterTaken
    | KeysTaken
    | RunFollowed
    | RunStored
    | RunNeedsCheckpoint
    | RunForOthers
    | RunRefused
    | CheckpointLocated
    | RoundSkipped
    | DiskFailed
)
Do = (
    # subscriptions and messages
    Subscribe
    | Unsubscribe
    | Resubscribe
    | PublishPresence
    | OfferReceivingKeys
    | SendDecline
    | SendReminder
    # rosters, keys and runs
    | AdoptRoster
    | ApplyRosterChange
    | TakeGrant
    | ResumeRun
    | OpenRun
    | LocateCheckpoint
    | BeginWithCheckpoint
    # everything else
    | TakeModel
    | DropModel
    | TakeNotice
    | Log
    | PublishStatus
    | Refuse
    | Stop
)
