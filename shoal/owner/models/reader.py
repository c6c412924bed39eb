"""Collect the announcement of the last round, and the checkpoints of a finished run, over any transport.

Presences come before the announcement, so that the histories that devices have seen can be compared. The
announcement names the transfer of each checkpoint. `ModelReader` reads no clock and waits for nothing;
`read_models` drives it on an MQTT connection that lasts for one command, and tests from a loopback broker.

`disagreements` compares the histories that devices have seen by the heads of the transcript in their presences. Example: pi-1
and pi-2 give one head for round 20 of run 3, and pi-3 gives another. The aggregator has shown two histories, or one of the
devices lies.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head
from edge_client.models.checkpoints import BadCheckpointError
from shoal import limits
from shoal.errors import LaterKindError, NotReadyError, ShoalError, UntrustedError, reason_of
from shoal.membership.roster import aggregator_of
from shoal.owner.broker.address import OwnerLink
from shoal.owner.keys.run_list import signed_plans
from shoal.owner.models.final_round import FinalRound, FinishedRun, OpenedState
from shoal.protocol import channels, sizes
from shoal.protocol.codec import decode
from shoal.protocol.messages import Presence
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.states import FORKED_ROUND, CheckpointRef, StateId, TranscriptHead
from shoal.protocol.topics import ParsedTopic, TopicKind, Topics
from shoal.transport.base import Message, Transport, TransportEvent

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.protocol.documents import RunPlan


def open_presence(sealed: bytes | memoryview, device: str, fleet: FleetDirectory) -> Presence:
    """Return a device's presence.

    Raises:
        UntrustedError: it is not the presence of a device in the roster, or under keys that the owner no longer has.
        SealError, WireError: it is altered or malformed.
    """
    member, (head, at) = fleet.roster.device(device), read_head(sealed)
    if member is None or head != channels.PRESENCE.head(fleet.name, device):
        raise UntrustedError(f"no presence of {device}")
    for version in fleet.versions:
        try:
            group = GroupKey(fleet.name, "broadcast", version.broadcast_key)
            presence = decode(open_from_group(group, sealed, head, at, member.sign_key), Presence)
        except SealError:
            continue
        if presence.device == device:
            return presence
    raise UntrustedError(f"a presence of {device} that is forged, or under keys that the owner does not have")


def disagreements(
    heads: Mapping[str, TranscriptHead],
    plans: Mapping[bytes, RunPlan],
    contrary: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Return a sentence for each round of which parties give different heads, and for each device that has left its run.

    A device that states the head of a round that its run can't have is named too.

    Args:
        heads: party -> its head; that of the aggregator is in its announcement.
        plans: run id -> plan, of the owner's runs; heads of other runs are left out.
        contrary: party -> the devices that have signed another history or state than it was shown, as its presence names them.
    """
    seen: dict[tuple[int, int], dict[bytes, list[str]]] = defaultdict(lambda: defaultdict(list))
    found = []
    for party, head in sorted(heads.items()):
        plan = plans.get(head.run_id)
        if plan is None:
            continue
        run = plan.run
        if head.round == FORKED_ROUND:
            found.append(
                f"{party} has left run {run}: the aggregator has shown it another history than before or than others"
            )
        elif head.round > plan.recipe.rounds + 1:
            found.append(
                f"{party} states the history of round {head.round} of run {run}, which has {plan.recipe.rounds} rounds"
            )
        else:
            seen[run, head.round][head.transcript].append(party)
    for (run, round_), parties in sorted(seen.items()):
        if len(parties) > 1:
            groups = "; ".join(", ".join(names) for names in parties.values())
            found.append(f"two histories of run {run}: the heads of round {round_} differ between {groups}")
    against: dict[str, list[str]] = defaultdict(list)
    for party, devices in sorted((contrary or {}).items()):
        for device in devices:
            against[device].append(party)
    for device, told in sorted(against.items()):
        were = "was" if len(told) == 1 else "were"
        found.append(f"{device} has signed another history or state than {', '.join(told)} {were} shown")
    return found


class ModelReader:
    """Reads the last announced round, and the models if the run has finished.

    Args:
        fleet: the owner's directory.
        plans: the signed plans.
        transport: connection to the broker.
        run: the run whose checkpoints to fetch; 0 for the announced one, None to fetch none.

    Attributes:
        last: the announced round; None if none has arrived.
        heads: device -> the head of the transcript in its presence.
        contrary: device -> the devices that have signed another history or state, by its presence.
        answers: online device -> number of the run whose finished model it answers with; 0 before its first.
    """

    def __init__(
        self, fleet: FleetDirectory, plans: Iterable[RunPlan], transport: Transport, run: int | None = 0
    ) -> None:
        self._fleet = fleet
        self._plans = {plan.run_id: plan for plan in plans}
        self._transport = transport
        self._run = run
        self._topics = Topics(fleet.name)
        self._chunks = Reassembler(whole_transfers=1)
        self._error: ShoalError | None = None
        self._wanted: dict[str, CheckpointRef] = {}
        self._opened: dict[StateId, OpenedState] = {}
        self._reasons: dict[StateId, str] = {}
        self._sealers: set[tuple[str, StateId]] = set()
        self._read: set[str] = set()
        self.last: FinalRound | None = None
        self.heads: dict[str, TranscriptHead] = {}
        self.contrary: dict[str, tuple[str, ...]] = {}
        self.answers: dict[str, int] = {}

    def start(self) -> None:
        """Subscribe to presences, then to announcements."""
        self._transport.subscribe(self._topics.filter(TopicKind.STATE))
        self._transport.subscribe(self._topics.filter(TopicKind.ROUND))

    @property
    def progress(self) -> tuple[int, int]:
        """Number of checkpoints that have arrived, and of those that are announced."""
        states = {ref.state for ref in self._wanted.values()}
        return len(states & (self._opened.keys() | self._reasons.keys())), len(states)

    @property
    def complete(self) -> bool:
        """Whether the announcement has arrived, and with it all checkpoints to fetch."""
        arrived, announced = self.progress
        spares = self._wanted.keys() <= self._read
        return (self.last is not None or self._error is not None) and arrived == announced and spares

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Handle one event of the transport; ``now_s`` is a monotonic clock's. Errors are stored for `finished_run`."""
        if not isinstance(event, Message) or not event.payload:
            return
        try:
            topic = self._topics.parse(event.topic)
        except ShoalError:
            return  # below a topic of ours, but none that the aggregator uses
        if topic.kind is TopicKind.ROUND:
            self._on_announcement(event.payload, now_s)
        elif topic.kind is TopicKind.STATE:
            self._on_presence(topic.device, event.payload, now_s)
        elif topic.kind is TopicKind.MODEL and topic.label in self._wanted:
            self._on_checkpoint(topic, event.payload, now_s)

    def _on_presence(self, device: str, chunk: bytes, now_s: float) -> None:
        try:
            transfer = self._chunks.add(f"presence {device}", chunk, now_s, channels.PRESENCE.limit())
            if transfer is not None:
                presence = open_presence(transfer.payload, device, self._fleet)
                if presence.head is not None:
                    self.heads[device] = presence.head
                roster = self._fleet.roster
                self.contrary[device] = tuple(d for d in presence.contrary if roster.device(d) is not None)
                if presence.online:
                    self.answers[device] = presence.answers
        except ShoalError:
            return  # not the device's own, or under keys of long ago: it shows nothing

    def histories(self) -> list[str]:
        """Return a sentence for each sign that devices have seen different histories of a run; none if all agree."""
        found = dict(self.heads)
        if self.last is not None:
            a = self.last.announcement
            found[aggregator_of(self._fleet.roster).name] = TranscriptHead(a.run_id, a.round, a.held.transcript)
        return disagreements(found, self._plans, self.contrary)

    def _on_announcement(self, chunk: bytes, now_s: float) -> None:
        devices = len(self._fleet.roster.devices) + sizes.FLEET_GROWTH_DEVICES
        try:
            limit = channels.ANNOUNCEMENT.limit(sizes.announcement_bytes(devices, limits.MAX_MODELS))
            transfer = self._chunks.add("round", chunk, now_s, limit)
            if transfer is None:
                return
            found = FinalRound.open(transfer.payload, self._fleet, self._plans)
        except LaterKindError:
            return
        except ShoalError as error:
            self._error = error
            return
        if self.last is not None and found.announcement.place < self.last.announcement.place:
            return  # repeated by the broker
        self.last, self._error = found, None
        self._follow(found)

    def _follow(self, last: FinalRound) -> None:
        """Subscribe to the checkpoints of a finished run, and to no others."""
        refs: list[CheckpointRef] = []
        if self._run is not None and self._run in (0, last.plan.run):
            try:
                refs = [*last.wanted().values(), *last.spares()]
            except NotReadyError:
                refs = []
        wanted = {ref.label: ref for ref in refs}
        for label in self._wanted.keys() - wanted.keys():
            self._transport.unsubscribe(self._topics.filter(TopicKind.MODEL, label))
        self._wanted = wanted
        self._opened, self._reasons, self._sealers, self._read = {}, {}, set(), set()
        for label in wanted:  # also those from before, so that the broker sends again what it retains
            self._transport.subscribe(self._topics.filter(TopicKind.MODEL, label))

    def _on_checkpoint(self, topic: ParsedTopic, chunk: bytes, now_s: float) -> None:
        last, ref = self.last, self._wanted[topic.label]
        assert last is not None, "labels come from an announcement"
        limit = channels.CHECKPOINT.limit(sizes.checkpoint_bytes(last.plan, last.most_task_bytes))
        try:
            transfer = self._chunks.add(topic.label, chunk, now_s, limit)
            # No announcement has the name of a spare.
            if transfer is None or (any(ref.transfer) and transfer.transfer_id != ref.transfer):
                return
            self._read.add(topic.label)
            found = last.open_checkpoint(ref, transfer.payload, self._fleet.roster)
            self._opened.setdefault(ref.state, found)
            self._sealers.add((found.sealed_by, ref.state))
        except ShoalError as error:
            self._read.add(topic.label)
            if isinstance(error, BadCheckpointError):
                self._sealers.add((error.sealed_by, ref.state))
            before = self._reasons.get(ref.state)
            self._reasons[ref.state] = reason_of(error) if before is None else f"{before}; {reason_of(error)}"

    def doubts(self) -> list[str]:
        """Return a sentence for each device whose checkpoint of the final round is of no use, or that has sealed none."""
        wanted = {ref.state for ref in self._wanted.values()}
        unsealed = [] if self.last is None or not wanted else self.last.unsealed(self._sealers, self._fleet.roster)
        return [*self._reasons.values(), *unsealed]

    def last_round(self) -> FinalRound:
        """Return the announced round.

        Raises:
            NotReadyError: none is on the broker.
            ConfigError, UntrustedError, IntegrityError: it can't be opened.
        """
        if self._error is not None:
            raise self._error
        if self.last is None:
            raise NotReadyError(
                "no round is announced at the broker: no run of this fleet has begun, or the broker has lost its messages",
                hint="start the aggregator, and put a signed run into its directory; where `shoal-fleet broker-config` of an "
                "earlier version made the access list, make it again: the owner may not have been allowed to read this",
            )
        return self.last

    def finished_run(self) -> FinishedRun:
        """Return the models.

        Raises:
            NotReadyError: no run has begun, the run is under way, or the broker has another run than the wanted one.
            ConfigError: the owner's directory lacks keys or the run's file.
            UntrustedError, IntegrityError: what the broker has can't be trusted or used.
        """
        last = self.last_round()
        if self._run not in (0, None, last.plan.run):
            raise NotReadyError(
                f"the broker holds run {last.plan.run}, not run {self._run}",
                hint="a run's models stay on the broker until the next run begins; `shoal-fleet models list` shows what is "
                "there, and a folder that `models get` has written serves as well",
            )
        return last.finished_run(self._opened, self._reasons, self._fleet.roster)


POLL_S: Final = 0.1
TELL_S: Final = 2.0
"""Time between two lines of progress."""


def read_models(fleet: FleetDirectory, wait_s: float, tell: Callable[[str], None], run: int | None = 0) -> ModelReader:
    """Connect, read what the broker retains, and return the reader.

    Args:
        fleet: the owner's directory.
        wait_s: seconds without any message after which the rest is taken not to come.
        tell: called with lines of progress and with warnings.
        run: see `ModelReader`.

    Raises:
        BrokerUnreachableError: no broker answers, or it refuses the owner's user.
    """
    with OwnerLink(fleet) as link:
        reader = ModelReader(fleet, signed_plans(fleet, tell, turns=True), link.transport, run)
        reader.start()
        link.transport.start(require=True)
        last_s = told_s = time.monotonic()
        while not reader.complete and (now_s := time.monotonic()) - last_s < wait_s:
            event = link.next(POLL_S)
            if event is not None:
                last_s = now_s
                reader.on_event(event, now_s)
            if now_s - told_s >= TELL_S:
                told_s = now_s
                tell(_progress(reader, link.transport.bytes_received))
    return reader


def _progress(reader: ModelReader, received: int) -> str:
    arrived, announced = reader.progress
    if not announced:
        return "waiting for the announcement of the last round"
    return f"{arrived} of {announced} models, {received / 1e6:.1f} MB received"
