"""The table of channels: every message between the parties, with its topic, seal, sender, receivers and largest size.

A channel is one kind of message on one topic. A topic may have several, distinguished by the kind in the chunks' headers: a
device publishes uploads, declines and reminders to ``d/{device}/up``. So topic and chunk kind together name the channel
(`channel_at`), and a receiver refuses a message whose sealed purpose is that of another channel.

Senders take the topic, the chunk kind and the envelope's head from here, receivers their subscriptions and limits. The
tables in docs/wire-format.md (`docs/channel_tables.py`) and the broker's access list (`shoal.owner.broker.config`) are
generated from it. A new channel is therefore one row, and the broker admits exactly its sender and its receivers.

Example: the row DECLINE says that a device publishes a `Decline`, sealed to the aggregator, to its own ``up`` topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from shoal import limits
from shoal.errors import WireError
from shoal.protocol import sizes
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.messages import Sealed
from shoal.protocol.topics import TopicKind

EVERYONE: Final = "*"
"""Recipient in the head of an envelope for the whole group."""


class Party(Enum):
    """A sender or receiver; the value is its name in the documentation."""

    OWNER = "owner"
    AGGREGATOR = "aggregator"
    WORKER = "worker"
    DEVICE = "device"
    NEWCOMER = "new device"


class Seal(Enum):
    """An envelope of `crypto.seal.envelope`, to one member or to a group; the value is its name in docs/wire-format.md.

    A signed document has no envelope and no head.
    """

    MEMBER = "member"
    BROADCAST = "group, broadcast"
    ENROLMENT = "group, enrolment"
    SIGNED = "none: signed, in clear"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Channel:
    """One row of the table.

    Attributes:
        name: unique name for documentation and messages.
        topic: pattern of its topic.
        kind: the kind in the headers of its chunks.
        sender: the party that publishes it.
        receivers: the parties that subscribe to it.
        message: the plaintext, in the words of docs/wire-format.md.
        seal: kind of its envelope.
        purpose: the purpose in the envelope's head; a name in braces stands for a variable part.
        largest: most bytes of the sealed message, for any plan and roster.
        formula: the limit for a given plan and roster, which `shoal.protocol.sizes` computes; empty if ``largest`` is the only
            limit.
        recipients: the parties that the envelope's head may name as its recipient; empty if it names EVERYONE.
        retained: whether the broker stores it for later subscribers.
        cleared_by: a receiver that removes the retained message once it has handled it.
        least_qos: 0 if some are sent without the broker's acknowledgement (ADR 15); all others are sent at 1.
    """

    name: str
    topic: TopicKind
    kind: ChunkKind
    sender: Party
    receivers: tuple[Party, ...]
    message: str
    seal: Seal
    purpose: str
    largest: int
    formula: str = ""
    recipients: tuple[Party, ...] = ()
    retained: bool = True
    cleared_by: Party | None = None
    least_qos: Literal[0, 1] = 1

    @property
    def stem(self) -> str:
        """The constant part of the purpose."""
        return self.purpose.partition("/{")[0]

    def head(self, fleet: str, sender: str, recipient: str = EVERYONE, **parts: object) -> Sealed:
        """Return the head of this channel's envelope.

        Args:
            fleet: name of the fleet.
            sender: a member's name.
            recipient: a member's name, or EVERYONE.
            parts: values of the names in braces in the purpose.
        """
        return Sealed(fleet, self.purpose.format(**parts), sender, recipient)

    def limit(self, size: int | None = None) -> dict[ChunkKind, int]:
        """Return the argument ``allowed`` of `Reassembler.add`: transfers of at most ``size`` and ``largest`` bytes."""
        return {self.kind: self.largest if size is None else min(size, self.largest)}


_HEAD: Final = f"{limits.SEALED_HEAD_BYTES:,}"
_EACH_MEMBER: Final = sizes.LISTED_BYTES

ROSTER: Final = Channel(
    name="roster",
    topic=TopicKind.ROSTER,
    kind=ChunkKind.ROSTER,
    sender=Party.AGGREGATOR,
    receivers=(Party.WORKER, Party.DEVICE),
    message="signed Roster",
    seal=Seal.BROADCAST,
    purpose="roster",
    largest=limits.MAX_GRANT_BYTES,
    formula=f"{_HEAD} + {_EACH_MEMBER} for each device that the change lists",
)
ROSTER_CHANGE: Final = Channel(
    name="roster change",
    topic=TopicKind.ROSTER_CHANGE,
    kind=ChunkKind.ROSTER,
    sender=Party.AGGREGATOR,
    receivers=(Party.DEVICE,),
    message="RosterChange",
    seal=Seal.BROADCAST,
    purpose="roster change",
    largest=limits.MAX_ROSTER_CHANGE_BYTES,
)
KEYS: Final = Channel(
    name="keys",
    topic=TopicKind.KEYS,
    kind=ChunkKind.GRANT,
    sender=Party.OWNER,
    receivers=(Party.AGGREGATOR, Party.WORKER, Party.DEVICE),
    message="GrantFile",
    seal=Seal.MEMBER,
    purpose="grant/{role}/{keys_since}/{receiving}",
    recipients=(Party.AGGREGATOR, Party.WORKER, Party.DEVICE),
    largest=limits.MAX_RENEWAL_BYTES,
)
RUN: Final = Channel(
    name="run package",
    topic=TopicKind.PLAN,
    kind=ChunkKind.PLAN,
    sender=Party.AGGREGATOR,
    receivers=(Party.DEVICE,),
    message="RunPackage",
    seal=Seal.BROADCAST,
    purpose="run",
    largest=limits.MAX_TRANSFER_BYTES,
    formula=f"{limits.FIRST_PACKAGE_BYTES:,}, or the announced `package_bytes`",
)
ANNOUNCEMENT: Final = Channel(
    name="announcement",
    topic=TopicKind.ROUND,
    kind=ChunkKind.ROUND,
    sender=Party.AGGREGATOR,
    receivers=(Party.OWNER, Party.DEVICE),
    message="Announcement",
    seal=Seal.BROADCAST,
    purpose="announcement",
    largest=limits.MAX_TRANSFER_BYTES,
    formula=f"{limits.FIRST_ANNOUNCEMENT_BYTES:,} + {2 + sizes.ORDER_BYTES} (n + {sizes.FLEET_GROWTH_DEVICES:,}) + "
    f"{2 + sizes.ANNOUNCED_MODEL_BYTES} m",
)
MEAN: Final = Channel(
    name="mean",
    topic=TopicKind.MODEL,
    kind=ChunkKind.MEAN,
    sender=Party.AGGREGATOR,
    receivers=(Party.DEVICE,),
    message="MeanHeader, vector",
    seal=Seal.BROADCAST,
    purpose="mean",
    largest=limits.MAX_TRANSFER_BYTES,
    formula=f"{_HEAD} + {sizes.COORDINATE_BYTES} d",
)
CHECKPOINT: Final = Channel(
    name="checkpoint",
    topic=TopicKind.MODEL,
    kind=ChunkKind.CHECKPOINT,
    sender=Party.AGGREGATOR,
    receivers=(Party.OWNER, Party.DEVICE),
    message="envelope of a device: SealedState, task, vector",
    seal=Seal.BROADCAST,
    purpose="checkpoint",
    largest=limits.MAX_TRANSFER_BYTES,
    formula=f"{2 * limits.SEALED_HEAD_BYTES:,} + {sizes.COORDINATE_BYTES} d + task",
)
NOTICE: Final = Channel(
    name="notice",
    topic=TopicKind.NOTICE,
    kind=ChunkKind.NOTICE,
    sender=Party.AGGREGATOR,
    receivers=(Party.DEVICE,),
    message="Notice",
    seal=Seal.BROADCAST,
    purpose="notice",
    largest=limits.MAX_NOTE_BYTES,
)
UPLOAD: Final = Channel(
    name="upload",
    topic=TopicKind.UP,
    kind=ChunkKind.UPLOAD,
    sender=Party.DEVICE,
    receivers=(Party.AGGREGATOR,),
    message="Upload, vector, attachment",
    seal=Seal.MEMBER,
    purpose="upload",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_TRANSFER_BYTES,
    formula=f"{_HEAD} + {sizes.COORDINATE_BYTES} d + {sizes.MARGIN_BYTES} m + {sizes.STATEMENT_BYTES} + "
    f"{2 * sizes.STATE_BYTES} (m + 1), plus the attachment that the assignment allows",
    retained=False,
    least_qos=0,
)
DECLINE: Final = Channel(
    name="decline",
    topic=TopicKind.UP,
    kind=ChunkKind.DECLINE,
    sender=Party.DEVICE,
    receivers=(Party.AGGREGATOR,),
    message="Decline",
    seal=Seal.MEMBER,
    purpose="decline",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_NOTE_BYTES,
    retained=False,
)
REMINDER: Final = Channel(
    name="reminder",
    topic=TopicKind.UP,
    kind=ChunkKind.REMINDER,
    sender=Party.DEVICE,
    receivers=(Party.AGGREGATOR,),
    message="Reminder",
    seal=Seal.MEMBER,
    purpose="reminder",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_NOTE_BYTES,
    retained=False,
)
CONTROL: Final = Channel(
    name="control",
    topic=TopicKind.CTL,
    kind=ChunkKind.CONTROL,
    sender=Party.AGGREGATOR,
    receivers=(Party.DEVICE,),
    message="Control",
    seal=Seal.BROADCAST,
    purpose="control",
    recipients=(Party.DEVICE,),
    largest=limits.MAX_CONTROL_BYTES,
    retained=False,
)
PART: Final = Channel(
    name="part of an update",
    topic=TopicKind.PART,
    kind=ChunkKind.PART,
    sender=Party.DEVICE,
    receivers=(Party.WORKER,),
    message="UploadPart, part",
    seal=Seal.MEMBER,
    purpose="part",
    recipients=(Party.WORKER,),
    largest=limits.MAX_TRANSFER_BYTES,
    formula=f"{_HEAD} + {sizes.COORDINATE_BYTES} times the part's coordinates",
    retained=False,
    least_qos=0,
)
PART_REMINDER: Final = Channel(
    name="reminder of a part",
    topic=TopicKind.PART,
    kind=ChunkKind.REMINDER,
    sender=Party.DEVICE,
    receivers=(Party.WORKER,),
    message="Reminder",
    seal=Seal.MEMBER,
    purpose="part reminder",
    recipients=(Party.WORKER,),
    largest=limits.MAX_NOTE_BYTES,
    retained=False,
)
PART_CONTROL: Final = Channel(
    name="control of a part",
    topic=TopicKind.PART_CTL,
    kind=ChunkKind.CONTROL,
    sender=Party.WORKER,
    receivers=(Party.DEVICE,),
    message="Control",
    seal=Seal.BROADCAST,
    purpose="part control",
    recipients=(Party.DEVICE,),
    largest=limits.MAX_CONTROL_BYTES,
    retained=False,
)
MEAN_PART: Final = Channel(
    name="part of a mean",
    topic=TopicKind.MEAN_PART,
    kind=ChunkKind.MEAN_PART,
    sender=Party.WORKER,
    receivers=(Party.DEVICE,),
    message="MeanPartHeader, part",
    seal=Seal.BROADCAST,
    purpose="mean part",
    largest=limits.MAX_TRANSFER_BYTES,
    formula=f"{_HEAD} + {sizes.COORDINATE_BYTES} times the longest part's coordinates",
)
JOB: Final = Channel(
    name="job",
    topic=TopicKind.JOB,
    kind=ChunkKind.JOB,
    sender=Party.AGGREGATOR,
    receivers=(Party.WORKER,),
    message="Job",
    seal=Seal.MEMBER,
    purpose="job",
    recipients=(Party.WORKER,),
    largest=limits.MAX_JOB_BYTES,
    retained=False,
)
SHARD_ORDER: Final = Channel(
    name="order to a worker",
    topic=TopicKind.JOB,
    kind=ChunkKind.ORDER,
    sender=Party.AGGREGATOR,
    receivers=(Party.WORKER,),
    message="ShardOrder",
    seal=Seal.MEMBER,
    purpose="shard order",
    recipients=(Party.WORKER,),
    largest=limits.MAX_JOB_BYTES,
    retained=False,
)
REPORT: Final = Channel(
    name="report",
    topic=TopicKind.REPORT,
    kind=ChunkKind.REPORT,
    sender=Party.WORKER,
    receivers=(Party.AGGREGATOR,),
    message="PartReport",
    seal=Seal.MEMBER,
    purpose="report",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_REPORT_BYTES,
    retained=False,
)
JOB_DONE: Final = Channel(
    name="answer to a job",
    topic=TopicKind.REPORT,
    kind=ChunkKind.DONE,
    sender=Party.WORKER,
    receivers=(Party.AGGREGATOR,),
    message="JobDone",
    seal=Seal.MEMBER,
    purpose="job done",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_REPORT_BYTES,
    retained=False,
)
OPEN_CELLS: Final = Channel(
    name="request to the keeper",
    topic=TopicKind.JOB,
    kind=ChunkKind.CELLS,
    sender=Party.AGGREGATOR,
    receivers=(Party.WORKER,),
    message="OpenCells",
    seal=Seal.MEMBER,
    purpose="open cells",
    recipients=(Party.WORKER,),
    largest=limits.MAX_JOB_BYTES,
    retained=False,
)
CELL_SUMS: Final = Channel(
    name="answer of the keeper",
    topic=TopicKind.REPORT,
    kind=ChunkKind.SUMS,
    sender=Party.WORKER,
    receivers=(Party.AGGREGATOR,),
    message="CellSums, sums of pads",
    seal=Seal.MEMBER,
    purpose="cell sums",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_TRANSFER_BYTES,
    retained=False,
)
WORKER_STATE: Final = Channel(
    name="presence of a worker",
    topic=TopicKind.WORKER_STATE,
    kind=ChunkKind.STATE,
    sender=Party.WORKER,
    receivers=(Party.AGGREGATOR, Party.WORKER),
    message="signed WorkerPresence",
    seal=Seal.SIGNED,
    purpose="document/WorkerPresence",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_NOTE_BYTES,
)
SERVER_STATE: Final = Channel(
    name="presence of the aggregator",
    topic=TopicKind.SERVER_STATE,
    kind=ChunkKind.STATE,
    sender=Party.AGGREGATOR,
    receivers=(Party.AGGREGATOR,),
    message="signed WorkerPresence",
    seal=Seal.SIGNED,
    purpose="document/WorkerPresence",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_NOTE_BYTES,
    retained=False,
)
ANNOUNCED_AGAIN: Final = Channel(
    name="announcement, to one device",
    topic=TopicKind.CTL,
    kind=ChunkKind.ROUND_AGAIN,
    sender=Party.AGGREGATOR,
    receivers=(Party.DEVICE,),
    message="Announcement",
    seal=Seal.BROADCAST,
    purpose=ANNOUNCEMENT.purpose,
    largest=ANNOUNCEMENT.largest,
    formula=ANNOUNCEMENT.formula,
    retained=False,
)
REVOCATION: Final = Channel(
    name="roster, to a revoked device",
    topic=TopicKind.CTL,
    kind=ChunkKind.ROSTER,
    sender=Party.AGGREGATOR,
    receivers=(Party.DEVICE,),
    message="signed Roster",
    seal=Seal.MEMBER,
    purpose="roster",
    recipients=(Party.DEVICE,),
    largest=limits.MAX_GRANT_BYTES,
    formula=f"{_HEAD} + {_EACH_MEMBER} (n + {sizes.FLEET_GROWTH_DEVICES:,})",
    retained=False,
)
PRESENCE: Final = Channel(
    name="presence",
    topic=TopicKind.STATE,
    kind=ChunkKind.STATE,
    sender=Party.DEVICE,
    receivers=(Party.OWNER, Party.AGGREGATOR, Party.DEVICE),
    message="Presence",
    seal=Seal.BROADCAST,
    purpose="presence",
    largest=limits.MAX_NOTE_BYTES,
)
RECEIVING: Final = Channel(
    name="receiving keys",
    topic=TopicKind.RECEIVING,
    kind=ChunkKind.RECEIVING,
    sender=Party.DEVICE,
    receivers=(Party.OWNER,),
    message="signed ReceivingNotice",
    seal=Seal.SIGNED,
    purpose="document/ReceivingNotice",
    recipients=(Party.OWNER,),
    largest=limits.MAX_NOTE_BYTES,
)
ENROLMENT: Final = Channel(
    name="enrolment request",
    topic=TopicKind.ENROL,
    kind=ChunkKind.ENROL,
    sender=Party.NEWCOMER,
    receivers=(Party.OWNER,),
    message="HMAC, EnrolStatement",
    seal=Seal.ENROLMENT,
    purpose="enrolment",
    recipients=(Party.OWNER,),
    largest=limits.MAX_ENROLMENT_BYTES,
    cleared_by=Party.OWNER,
)
GRANT: Final = Channel(
    name="grant",
    topic=TopicKind.GRANT,
    kind=ChunkKind.GRANT,
    sender=Party.OWNER,
    receivers=(Party.NEWCOMER,),
    message="GrantFile",
    seal=Seal.MEMBER,
    purpose="grant/{role}/{keys_since}/{receiving}",
    recipients=(Party.NEWCOMER,),
    largest=limits.MAX_GRANT_BYTES,
)
REFUSAL: Final = Channel(
    name="refusal of a request",
    topic=TopicKind.GRANT,
    kind=ChunkKind.REFUSAL,
    sender=Party.OWNER,
    receivers=(Party.NEWCOMER,),
    message="signed EnrolRefusal",
    seal=Seal.SIGNED,
    purpose="document/EnrolRefusal",
    recipients=(Party.NEWCOMER,),
    largest=limits.MAX_NOTE_BYTES,
    retained=False,
)
OWNER_ROSTER: Final = Channel(
    name="roster, from the owner",
    topic=TopicKind.OWNER_ROSTER,
    kind=ChunkKind.ROSTER,
    sender=Party.OWNER,
    receivers=(Party.AGGREGATOR, Party.OWNER),
    message="signed Roster",
    seal=Seal.MEMBER,
    purpose="roster/{sequence}/{digest}",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_GRANT_BYTES,
)
REQUEST: Final = Channel(
    name="request",
    topic=TopicKind.OWNER_REQUEST,
    kind=ChunkKind.REQUEST,
    sender=Party.OWNER,
    receivers=(Party.AGGREGATOR,),
    message="OwnerRequest, RunPackage",
    seal=Seal.MEMBER,
    purpose="request",
    recipients=(Party.AGGREGATOR,),
    largest=limits.MAX_REQUEST_BYTES,
    retained=False,
)
ANSWER: Final = Channel(
    name="answer",
    topic=TopicKind.OWNER_ANSWER,
    kind=ChunkKind.ANSWER,
    sender=Party.AGGREGATOR,
    receivers=(Party.OWNER,),
    message="OwnerAnswer, document",
    seal=Seal.MEMBER,
    purpose="answer",
    recipients=(Party.OWNER,),
    largest=limits.MAX_ANSWER_BYTES,
    retained=False,
)

CHANNELS: Final = (
    ROSTER,
    ROSTER_CHANGE,
    KEYS,
    RUN,
    ANNOUNCEMENT,
    MEAN,
    CHECKPOINT,
    NOTICE,
    MEAN_PART,
    UPLOAD,
    PART,
    PART_REMINDER,
    PART_CONTROL,
    JOB,
    SHARD_ORDER,
    REPORT,
    JOB_DONE,
    OPEN_CELLS,
    CELL_SUMS,
    WORKER_STATE,
    SERVER_STATE,
    DECLINE,
    REMINDER,
    CONTROL,
    ANNOUNCED_AGAIN,
    REVOCATION,
    PRESENCE,
    RECEIVING,
    ENROLMENT,
    GRANT,
    REFUSAL,
    OWNER_ROSTER,
    REQUEST,
    ANSWER,
)
_BY_PLACE: Final = {(channel.topic, channel.kind): channel for channel in CHANNELS}


def channel_at(topic: TopicKind, kind: ChunkKind) -> Channel:
    """Return the channel of a transfer of ``kind`` on ``topic``.

    Raises:
        WireError: there is none.
    """
    found = _BY_PLACE.get((topic, kind))
    if found is None:
        raise WireError(f"a transfer of kind {kind.name.lower()} on {topic.base}")
    return found


def written_by(party: Party) -> tuple[TopicKind, ...]:
    """Return the topics that a party publishes to, to send or to clear, in the order of `TopicKind`."""
    return tuple(t for t in TopicKind if any(c.topic is t and party in (c.sender, c.cleared_by) for c in CHANNELS))


def read_by(party: Party) -> tuple[TopicKind, ...]:
    """Return the topics that a party subscribes to, in the order of `TopicKind`."""
    return tuple(t for t in TopicKind if any(c.topic is t and party in c.receivers for c in CHANNELS))
