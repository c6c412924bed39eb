"""Messages of devices: their chunks, from which topics and of which sizes (`Inbound`), and their presences.

`DevicePresence` turns presences into events of the engine. A presence is published by the device, or by the broker as the
device's last will when the connection is lost. A will of an earlier incarnation may arrive after the device has started again:
it has a lower `Presence.birth` and is ignored. Example: online with birth 5, then a will with birth 4, leaves the device
online.

`odd_history` says whether this aggregator's own history of the run is the odd one, as after the restore of an old backup.
Devices sign the run's transcript in their uploads and presences. One that signs another transcript lies, or fails. As many as
certify a state, with one and the same other transcript, know better: no device is to blame.

Example: an aggregator is restored at round 4 from a backup. Three devices state one head of round 9, which it has not reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aggregator.membership import UNKNOWN_HINT, AggregatorMembership, signed_by
from aggregator.rounds.engine import Engine
from aggregator.rounds.quorum_and_deadline import certifiers
from aggregator.rounds.state import CameOnline, EngineState, WentOffline
from aggregator.status.watch import FleetWatch
from aggregator.storage.chunk_spool import ChunkSpool
from crypto.seal.envelope import SealError
from shoal.errors import UntrustedError
from shoal.membership.statements import FEWEST_SIGNERS
from shoal.protocol import channels
from shoal.protocol.channels import PRESENCE
from shoal.protocol.chunking import ChunkHeader
from shoal.protocol.codec import decode
from shoal.protocol.messages import Presence
from shoal.protocol.reassembly import Reassembler, ReceivedChunks, Transfer
from shoal.protocol.sizes import upload_bytes
from shoal.protocol.states import FORKED_ROUND, TranscriptHead
from shoal.protocol.topics import ParsedTopic, TopicKind, Topics
from shoal.transport.base import Message, Transport


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
        upload = channels.UPLOAD.limit(self.upload_bytes(device, state))
        allowed = {**upload, **channels.DECLINE.limit(), **channels.REMINDER.limit()}
        return self.chunks.collect(device, chunk, now_s, allowed, parsed=parsed)

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


class DevicePresence:
    """Checks the presences of one fleet; remembers the newest incarnation of each device.

    Args:
        membership: the aggregator's.
        watch: records the presences for `status`; None records nothing.
        wire: wire version of the run that is served; None if none is. A device that does not speak it counts as offline.

    Attributes:
        heads: device -> the newest head of a transcript that it has stated.
    """

    def __init__(
        self, membership: AggregatorMembership, watch: FleetWatch | None = None, wire: int | None = None
    ) -> None:
        self._wire = wire
        self._membership = membership
        self._watch = watch
        self._births = {} if watch is None else watch.births
        self.heads: dict[str, TranscriptHead] = {}

    def take(self, device: str, transfer: Transfer, *, retained: bool = False) -> CameOnline | WentOffline | None:
        """Return the event of a presence on ``device``'s topic; None if it is of an earlier incarnation.

        Args:
            device: the device of the topic.
            transfer: its message.
            retained: whether the broker had stored it before we subscribed.

        Raises:
            UntrustedError: the device is not in the roster, or has not signed the presence.
            WireError: malformed.
        """
        member = self._membership.roster.device(device)
        if member is None:
            raise UntrustedError(f"{device} is not in the roster", hint=UNKNOWN_HINT)
        try:
            plain = self._membership.open_from_device(member, transfer.payload, transfer.signed)
        except SealError:
            # Sealed under an older key version: the will of an earlier connection, or a device that lacks the newer
            # keys. Either way the device can't take part in this run.
            if self._membership.is_presence_of(member, transfer.payload, transfer.signed):
                if self._watch is not None:
                    self._watch.devices.went(device)
                return WentOffline(device)
            raise
        with signed_by(device):
            presence = decode(plain, Presence)
            if (presence.fleet, presence.device) != (self._membership.fleet, device):
                raise UntrustedError(f"a presence of {presence.device[:64]!r} of {presence.fleet[:64]!r}")
        newest = self._births.get(member.sign_key, 0)
        # The program of the newest birth is to end: it runs in a copy of the device's directory.
        if presence.birth < newest and presence.rival != newest:
            return None
        self._births[member.sign_key] = presence.birth
        if presence.head is not None:
            self.heads[device] = presence.head
        if self._watch is not None:
            self._watch.came(presence, retained=retained)
        speaks = self._wire in (None, presence.wire)
        return CameOnline(device) if presence.online and speaks else WentOffline(device)


class PresenceInbox:
    """Reads the presences of the fleet while no run is served, for `status` only.

    Args:
        membership: the aggregator's.
        watch: records them.
    """

    def __init__(self, membership: AggregatorMembership, watch: FleetWatch) -> None:
        self._membership = membership
        self._topics = Topics(membership.fleet)
        self._presences = DevicePresence(membership, watch)
        self._chunks = Reassembler(PRESENCE.largest, whole_transfers=1, max_per_source=1)

    def subscribe(self, transport: Transport) -> None:
        """Subscribe to the presences of all devices; repeat it after a reconnection, since the broker may have lost some."""
        transport.subscribe(self._topics.filter(TopicKind.STATE))

    def take(self, message: Message, now_s: float) -> None:
        """Record a message if it is a presence of a device in the roster.

        Args:
            message: on any topic of the fleet.
            now_s: monotonic seconds.

        Raises:
            UntrustedError: the device has not signed it.
            WireError: malformed, or too large.
        """
        parsed = self._topics.parse(message.topic)
        if parsed.kind is not TopicKind.STATE or not message.payload:
            return
        if self._membership.roster.device(parsed.device) is None:
            return
        self._chunks.expire(now_s)
        transfer = self._chunks.add(parsed.device, message.payload, now_s, PRESENCE.limit())
        if transfer is not None:
            self._presences.take(parsed.device, transfer, retained=message.retained)


ODD_HINT: Final = (
    "this aggregator was restored from an old backup, or another one has served the run: put back its newest directory, or end "
    "the run with shoal-fleet run stop and sign another; no device is to blame"
)


def odd_history(state: EngineState, heads: Mapping[str, TranscriptHead]) -> str:
    """Return that enough devices have signed one and the same other history; empty if they have not.

    Args:
        state: of the engine.
        heads: device -> the newest head in its presence.
    """
    ours = (state.head, state.held.transcript)
    signers: dict[tuple[int, bytes], set[str]] = defaultdict(set)
    for device, other in state.others.items():
        signers[state.round, other].add(device)
    for device, head in heads.items():
        # A device that has left the run states the last head that it knew, which may be ours.
        later = head.round > state.round if head.round != FORKED_ROUND else head.transcript not in ours
        other_now = head.round == state.round and state.plan is not None and head.transcript != state.head
        if head.run_id == state.run.run_id and device in state.devices and (later or other_now):
            signers[head.round, head.transcript].add(device)
    most = max(map(len, signers.values()), default=0)
    if state.finished or most < max(FEWEST_SIGNERS, certifiers(state)):
        return ""
    return f"{most} devices have signed another history of run {state.run.run} than this aggregator has"
