"""Size limits for the transfers that a device accepts, by topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shoal import limits
from shoal.errors import UntrustedError
from shoal.protocol import channels, sizes
from shoal.protocol.topics import TopicKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_client.followed_run import Run
    from edge_client.membership import DeviceMembership
    from edge_client.protocol.model_feed import ModelFeed
    from edge_client.protocol.roster_sync import RosterSync
    from shoal.protocol.chunking import ChunkKind
    from shoal.protocol.documents import RunPlan
    from shoal.protocol.messages import Announcement
    from shoal.protocol.topics import ParsedTopic

UNSUBSCRIBED: Final[Mapping[ChunkKind, int]] = {}
"""The limits of a topic that the device has unsubscribed from. The broker may still send messages that it had queued."""


class Inbound:
    """Checks each chunk's topic before the chunk takes any memory.

    A device that does not know the run yet does not know the size of the run package either. It accepts one of up to
    `limits.FIRST_PACKAGE_BYTES`, and a larger one once the aggregator's signed announcement has given its size.

    Args:
        membership: keys and fleet.
        models: the subscriptions to means and checkpoints.
        rosters: the roster that the device has requested, if any.
    """

    def __init__(self, membership: DeviceMembership, models: ModelFeed, rosters: RosterSync) -> None:
        self._membership = membership
        self._feed = models
        self._rosters = rosters
        self._run: Run | None = None
        self._late: RunPlan | None = None
        self._task_bytes = self._models = self._package_bytes = 0

    def begin(self, run: Run) -> None:
        """Use the limits of ``run`` from now on."""
        self._run, self._late = run, None
        self._task_bytes = len(run.bundle.to_bytes())

    def begin_late(self, plan: RunPlan) -> None:
        """Use the limits of a run that the device begins with a checkpoint; the task is at most as large as the package."""
        self._late = plan

    @property
    def most_task_bytes(self) -> int:
        """The largest task that a checkpoint may contain, in bytes."""
        return self._package_most

    def announced(self, announcement: Announcement) -> bool:
        """Take the sizes in an authentic announcement; return whether a larger run package than before is accepted now."""
        before = self._package_most
        self._package_bytes = announcement.package_bytes
        self._models = len(announcement.held.offers)
        return self._package_most > before

    def source(self, topic: ParsedTopic) -> str:
        """Return the name under which a topic's chunks are collected."""
        return self.source_of(topic.kind, topic.label)

    def source_of(self, kind: TopicKind, label: str = "") -> str:
        """Return the same for a kind of topic and, for a model, its label."""
        return f"{kind.name}/{label}"

    def allowed(self, topic: ParsedTopic) -> Mapping[ChunkKind, int]:
        """Return the largest transfer of each kind on a topic, in bytes; UNSUBSCRIBED if none is expected any more.

        Raises:
            UntrustedError: the device has never subscribed to the topic.
        """
        match topic.kind:
            case TopicKind.CTL if topic.device == self._membership.name:
                # The aggregator sends a roster here only to a device that was revoked while it was offline.
                return {**channels.CONTROL.limit(), **channels.REVOCATION.limit(sizes.roster_bytes(self._devices))}
            case TopicKind.KEYS if topic.device == self._membership.name:
                return channels.KEYS.limit()
            case TopicKind.ROUND:
                return channels.ANNOUNCEMENT.limit(sizes.announcement_bytes(self._devices, self._most_models))
            case TopicKind.PLAN:
                return channels.RUN.limit(self._package_most)
            case TopicKind.ROSTER_CHANGE:
                return channels.ROSTER_CHANGE.limit()
            case TopicKind.ROSTER:
                wanted = self._rosters.wanted_devices
                return UNSUBSCRIBED if wanted is None else channels.ROSTER.limit(sizes.roster_bytes(wanted))
            case TopicKind.MODEL:
                return self._model(topic.label)
        raise UntrustedError(
            f"a message on {topic.kind.base}, which this device has not subscribed to",
            hint="check the broker: it delivers messages that the device has not subscribed to",
        )

    def _model(self, label: str) -> Mapping[ChunkKind, int]:
        if label not in self._feed.labels:
            return UNSUBSCRIBED
        if self._late is not None:
            return channels.CHECKPOINT.limit(sizes.checkpoint_bytes(self._late, self._package_most))
        if self._run is None:
            return UNSUBSCRIBED
        checkpoint = channels.CHECKPOINT.limit(sizes.checkpoint_bytes(self._run.plan, self._task_bytes))
        return {**channels.MEAN.limit(sizes.model_bytes(self._run.plan)), **checkpoint}

    @property
    def _devices(self) -> int:
        return len(self._membership.roster.devices) + sizes.FLEET_GROWTH_DEVICES

    @property
    def _most_models(self) -> int:
        return limits.MAX_MODELS if self._run is None else max(self._run.plan.max_models, self._models)

    @property
    def _package_most(self) -> int:
        return max(limits.FIRST_PACKAGE_BYTES, self._package_bytes)
