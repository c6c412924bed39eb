"""The transfers that the aggregator accepts: from whom, on which topic and of which size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aggregator.membership import UNKNOWN_HINT
from shoal import limits
from shoal.errors import UntrustedError
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.sizes import upload_bytes
from shoal.protocol.topics import TopicKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aggregator.membership import AggregatorMembership
    from aggregator.rounds.engine import Engine
    from aggregator.rounds.state import EngineState
    from shoal.protocol.topics import ParsedTopic

PRESENCE: Final = {ChunkKind.STATE: limits.MAX_NOTE_BYTES}


class Inbound:
    """Checks each chunk's topic before the chunk takes any memory.

    Args:
        membership: whose roster names the devices.
        engine: knows what a device may attach to an upload.
    """

    def __init__(self, membership: AggregatorMembership, engine: Engine) -> None:
        self._membership = membership
        self._engine = engine

    def source(self, topic: ParsedTopic) -> str:
        """Return the device that a topic belongs to.

        Raises:
            UntrustedError: the roster does not list the device, or the aggregator does not read the topic.
        """
        if topic.kind not in (TopicKind.UP, TopicKind.STATE):
            raise UntrustedError(
                f"a message on a topic of kind {topic.kind.value!r}, which the aggregator does not read",
                hint="check the broker's access list: shoal-fleet broker-config",
            )
        if self._membership.roster.device(topic.device) is None:
            raise UntrustedError(f"{topic.device} is not in the roster", hint=UNKNOWN_HINT)
        return topic.device

    def allowed(self, device: str, state: EngineState) -> Mapping[ChunkKind, int]:
        """Return the largest transfer of each kind that a device may send to its ``up`` topic, in bytes."""
        return {
            ChunkKind.UPLOAD: self.upload_bytes(device, state),
            ChunkKind.DECLINE: limits.MAX_NOTE_BYTES,
            ChunkKind.REMINDER: limits.MAX_NOTE_BYTES,
        }

    def upload_bytes(self, device: str, state: EngineState) -> int:
        """Return the largest sealed upload that a device may send while the run is in ``state``."""
        models = 0 if state.plan is None else len(state.plan.models)
        return upload_bytes(state.run, models, self._engine.most_attached(state, device))
