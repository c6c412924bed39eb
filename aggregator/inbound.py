"""Reassembly of the chunks that devices send: which devices, which topics and which sizes are accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aggregator.membership import UNKNOWN_HINT
from aggregator.storage.chunk_spool import ChunkSpool
from shoal.errors import UntrustedError
from shoal.protocol import channels
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.sizes import upload_bytes
from shoal.protocol.topics import TopicKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from aggregator.membership import AggregatorMembership
    from aggregator.rounds.engine import Engine
    from aggregator.rounds.state import EngineState
    from shoal.protocol.chunking import ChunkHeader, ChunkKind
    from shoal.protocol.reassembly import ReceivedChunks, Transfer
    from shoal.protocol.topics import ParsedTopic


class Inbound:
    """Checks the sender and the size of each chunk before the chunk uses any memory, and reassembles transfers.

    Args:
        membership: the roster that lists the devices.
        engine: knows how many bytes a device may attach to an upload.
        directory: for the temporary file of chunks that do not fit in memory.

    Attributes:
        chunks: the incomplete transfers of all devices.
    """

    def __init__(self, membership: AggregatorMembership, engine: Engine, directory: Path) -> None:
        self._membership = membership
        self._engine = engine
        self._spool = ChunkSpool(directory)
        self.chunks = Reassembler(spool=self._spool)

    def source(self, topic: ParsedTopic) -> str:
        """Return the device that a topic belongs to.

        Raises:
            UntrustedError: the roster does not list the device, or the aggregator does not read the topic.
        """
        if topic.kind not in (TopicKind.UP, TopicKind.STATE):
            raise UntrustedError(
                f"a message on {topic.kind.base}, which the aggregator does not read",
                hint="check the broker's access list: shoal-fleet broker-config",
            )
        if self._membership.roster.device(topic.device) is None:
            raise UntrustedError(f"{topic.device} is not in the roster", hint=UNKNOWN_HINT)
        return topic.device

    def presence(self, device: str, chunk: bytes, now_s: float) -> Transfer | None:
        """Take a chunk of the device's ``state`` topic; return the transfer that it completes.

        Raises:
            WireError: malformed, too large, or of another kind.
        """
        return self.chunks.add(_state_source(device), chunk, now_s, channels.PRESENCE.limit())

    def message(
        self, device: str, chunk: bytes, state: EngineState, now_s: float, parsed: tuple[ChunkHeader, memoryview]
    ) -> ReceivedChunks | None:
        """Take a chunk of the device's ``up`` topic; return the chunks of the transfer that it completes.

        Args:
            device: the sender as named by the topic.
            chunk: header and payload.
            state: of the run, which limits the size of an upload.
            now_s: the time.
            parsed: header and payload of the chunk.

        Raises:
            WireError: malformed, too large, of another kind, or there is no room for it.
        """
        return self.chunks.collect(device, chunk, now_s, self._allowed(device, state), parsed=parsed)

    def _allowed(self, device: str, state: EngineState) -> Mapping[ChunkKind, int]:
        upload = channels.UPLOAD.limit(self.upload_bytes(device, state))
        return {**upload, **channels.DECLINE.limit(), **channels.REMINDER.limit()}

    def upload_bytes(self, device: str, state: EngineState) -> int:
        """Return the size in bytes of the largest sealed upload that a device may send in ``state``."""
        models = 0 if state.plan is None else len(state.plan.models)
        return upload_bytes(state.run, models, self._engine.most_attached(state, device))

    def drop(self, device: str) -> None:
        """Drop the incomplete transfers of a device."""
        for source in (device, _state_source(device)):
            self.chunks.drop(source)

    def expire(self, now_s: float) -> None:
        """Drop the transfers that have been incomplete for too long."""
        self.chunks.expire(now_s)

    def close(self) -> None:
        """Delete the temporary file."""
        self._spool.close()


def _state_source(device: str) -> str:
    """Return the name under which a device's presences are reassembled, apart from its uploads."""
    return f"{device}/state"
