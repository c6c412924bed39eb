"""What a device accepts, by topic: size limits, which are checked before a chunk takes any memory, and contents.

A device that does not know the run yet does not know the size of the run package either. It accepts one of up to
`limits.FIRST_PACKAGE_BYTES`, and a larger one once the aggregator's signed announcement has given its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from edge_client.protocol.session_io import ModelTransfer
from shoal import limits
from shoal.errors import UntrustedError
from shoal.protocol import channels, sizes
from shoal.protocol.codec import decode
from shoal.protocol.documents import RosterChange
from shoal.protocol.messages import Announcement, Control, Notice
from shoal.protocol.shards import sealed_mean_part_bytes
from shoal.protocol.topics import ParsedTopic, TopicKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_client.protocol.session import DeviceSession
    from shoal.protocol.chunking import ChunkKind

UNSUBSCRIBED: Final[Mapping[ChunkKind, int]] = {}
"""The limits of a topic that the device has unsubscribed from. The broker may still send messages that it had queued."""

MESSAGES: Final[Mapping[channels.Channel, type[RosterChange | Announcement | Control | Notice]]] = {
    channels.ROSTER_CHANGE: RosterChange,
    channels.ANNOUNCEMENT: Announcement,
    channels.ANNOUNCED_AGAIN: Announcement,
    channels.CONTROL: Control,
    channels.PART_CONTROL: Control,
    channels.NOTICE: Notice,
}
"""Channels with one message each; the others carry models, documents and sealed data."""


def source(kind: TopicKind, label: str = "") -> str:
    """Return the name under which the chunks of a topic are collected; ``label`` is that of a model."""
    return f"{kind.name}/{label}"


def allowed(topic: ParsedTopic, session: DeviceSession, members: int) -> Mapping[ChunkKind, int]:
    """Return the largest transfer of each kind on a topic, in bytes; UNSUBSCRIBED if none is expected any more.

    Args:
        topic: of the chunk.
        session: of the device.
        members: number of devices in the roster, revoked ones among them.

    Raises:
        UntrustedError: the device has never subscribed to the topic.
    """
    devices = members + sizes.FLEET_GROWTH_DEVICES
    models = limits.MAX_MODELS if session.plan is None else max(session.plan.max_models, session.sizes.models)
    announcement = sizes.announcement_bytes(devices, models)
    match topic.kind:
        case TopicKind.CTL if topic.device == session.name:
            # The aggregator sends a roster here only to a device that was revoked while it was offline.
            revocation = channels.REVOCATION.limit(sizes.roster_bytes(devices))
            return {**channels.CONTROL.limit(), **revocation, **channels.ANNOUNCED_AGAIN.limit(announcement)}
        case TopicKind.KEYS if topic.device == session.name:
            return channels.KEYS.limit()
        case TopicKind.ROUND:
            return channels.ANNOUNCEMENT.limit(announcement)
        case TopicKind.NOTICE:
            return channels.NOTICE.limit()
        case TopicKind.PLAN:
            return channels.RUN.limit(session.sizes.most_package)
        case TopicKind.ROSTER_CHANGE:
            return channels.ROSTER_CHANGE.limit()
        case TopicKind.ROSTER:
            wanted = session.roster.devices
            return UNSUBSCRIBED if wanted is None else channels.ROSTER.limit(sizes.roster_bytes(wanted))
        case TopicKind.MODEL:
            return _model(topic.label, session)
        case TopicKind.MEAN_PART:
            plan = session.plan
            if plan is None or topic.label not in session.labels:
                return UNSUBSCRIBED
            return channels.MEAN_PART.limit(sealed_mean_part_bytes(plan))
        case TopicKind.PART_CTL if topic.device == session.name:
            return channels.PART_CONTROL.limit()
    raise UntrustedError(
        f"a message on {topic.kind.base}, which this device has not subscribed to",
        hint="check the broker: it delivers messages that the device has not subscribed to",
    )


def content(channel: channels.Channel, label: str, transfer: bytes, plain: memoryview) -> Any:
    """Return the content of an opened transfer as `DeviceSession.receive` takes it.

    Raises:
        WireError: it is malformed.
    """
    if channel in MESSAGES:
        return decode(plain, MESSAGES[channel])
    if channel in (channels.MEAN, channels.MEAN_PART, channels.CHECKPOINT):
        return ModelTransfer(label, transfer, plain)
    # A run package is not copied: it may have megabytes of origins.
    return plain if channel is channels.RUN else bytes(plain)


def _model(label: str, session: DeviceSession) -> Mapping[ChunkKind, int]:
    plan = session.plan
    if label not in session.labels:
        return UNSUBSCRIBED
    if session.late is not None:
        # The task in the checkpoint is at most as large as the run package.
        return channels.CHECKPOINT.limit(sizes.checkpoint_bytes(session.late, session.sizes.most_package))
    if plan is None:
        return UNSUBSCRIBED
    checkpoint = channels.CHECKPOINT.limit(sizes.checkpoint_bytes(plan, session.sizes.task))
    return {**channels.MEAN.limit(sizes.mean_bytes(plan)), **checkpoint}
