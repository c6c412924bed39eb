"""`shoal bench load --prepared`: all uploads are sealed before the clock starts, and one light process replays them.

An upload repeats the nonce of its round, and the nonces follow from a seed in the aggregator's store. The bench makes the
store before it starts the aggregator, so it knows the seed. It then lets the aggregator's own engine go through the run once
in memory: that gives every round's nonce, every device's assignment and the states of the models, and the uploads that answer
them.

The aggregator compares the digests of states and can't compute one, since it holds no model. So statements name a digest of the
state's name in place of one of the model, the same for every device.

Left out are the devices: N connections (there is one, and the broker can't tell), announcements, means and models opened,
training, masks and seals inside a round, checkpoints, reminders. The replaying process publishes a round's uploads as soon as
it sees the announcement. It opens the aggregator's answers only after the run. When the round stalls, it sends the uploads
again that have not been answered, and counts each as a reminder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from crypto.seal.envelope import seal_to_group
from edge_client.membership import DeviceMembership
from shoal import limits
from shoal.digests import sha256
from shoal.errors import IntegrityError
from shoal.membership.roster import aggregator_of
from shoal.membership.statements import sign_statement
from shoal.owner.runs.plan import round_mask
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, parse, split
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import Action, Assignment, Control, Presence, Upload
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.shards import digest_over
from shoal.protocol.states import NO_TRANSCRIPT, HeldState, StateId, Statement
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Message, Qos, TransportEvent
from shoal.transport.mqtt import MqttTransport
from shoal_lab.bench.load.driver import (
    GROUPS,
    TICK_S,
    drive,
    scale_of,
    spec_of,
    target_of,
)

if TYPE_CHECKING:
    from aggregator.rounds.held_models import KeptMean, KeptStep
    from aggregator.rounds.state import OpenRound
    from crypto.seal.identity import Identity
    from shoal.protocol.documents import RunPlan
    from shoal.types import Float32Vector
    from shoal_lab.bench.load.fleet_load import LoadFleet

PRESENCES_FILE: Final = "presences"
ITEM_HEAD: Final = struct.Struct("<HHI16s")
"""Before each prepared message in a file: length of the device's name, receiver, length of the payload, transfer id."""
COORDINATOR: Final = 0xFFFF
"""Receiver of a message that goes to the aggregator itself; workers have the numbers of the plan."""
PREPARED_SAMPLES: Final = 3
STEP: Final = 0.5
"""Prepared updates are this share of the way to the group's target."""
PENDING_MOST: Final = 128
"""Publishes that wait for the broker at a time; more would only take memory twice, here and in the file."""
SHORT_SLEEP_S: Final = 0.001
STALLED_S: Final = 10.0
"""Uploads without an answer are sent again after this time without any message from the aggregator."""


@dataclass(frozen=True, slots=True)
class Item:
    """One prepared message of a device, to the aggregator, or a part of an update to the worker ``receiver``."""

    device: str
    transfer: bytes
    payload: bytes
    receiver: int = COORDINATOR


def prepare(fleet: LoadFleet) -> Callable[[], None]:
    """Seal all presences and uploads of the run; return a function that starts the process which replays them.

    Call it before the aggregator starts: it makes the run's store.
    """
    folder = fleet.root / "prepared"
    folder.mkdir()
    write_items(folder / PRESENCES_FILE, presences(fleet))
    for round_, items in rehearse(fleet):
        write_items(folder / _round_file(round_), items)
    spec = {"joined": str(fleet.device_dir(fleet.names[0])), "prepared": str(folder), "devices": fleet.size}
    return lambda: fleet.start_driver("replay", "shoal_lab.bench.load.replay", spec)


def presences(fleet: LoadFleet) -> Iterator[Item]:
    """Yield the sealed presences of all devices."""
    group = fleet.fleet.broadcast
    for identity in fleet.identities:
        head = channels.PRESENCE.head(fleet.plan.fleet, identity.name)
        plain = encode(Presence(fleet.plan.fleet, identity.name, 1, online=True))
        yield Item(identity.name, bytes(16), seal_to_group(identity, group, head, plain))


def rehearse(fleet: LoadFleet) -> Iterator[tuple[int, list[Item]]]:
    """Yield each round's number and sealed uploads, in an order in which the aggregator will ask for them.

    Each of the hidden groups of devices has a target and a choice among the candidates of its own.

    Raises:
        IntegrityError: the engine opens no next round though all uploads of a round are there.
    """
    import numpy as np

    from aggregator.numerics.backend import select
    from aggregator.rounds.engine import Engine
    from aggregator.rounds.held_models import offers_of, transcript_of
    from aggregator.rounds.state import CameOnline, OpenRound
    from aggregator.storage.store import Store
    from aggregator.strategies.base import contribution_of
    from aggregator.strategies.registry import make_strategy
    from edge_client.learning.feedback import encode_update
    from edge_client.learning.update import seal_pieces
    from shoal.protocol.precision.seeds import upload_seed
    from shoal.protocol.shards import borders

    plan = fleet.plan
    store = Store(fleet.run_dir, plan)
    seed = store.seed
    store.close()
    backend = select("cpu", work_flops=2.0 * fleet.size**2 * plan.length)
    engine = Engine(plan, make_strategy(plan, backend), seed)
    roster = fleet.fleet.roster
    recipient = aggregator_of(roster)
    cuts = borders(plan.length, len(plan.workers))
    state, actions = engine.begin(roster.active(), roster.keys_since, roster)
    targets = [target_of(group, plan.length) for group in range(GROUPS)]
    for name in fleet.names:
        state, actions = engine.handle(state, CameOnline(name))
    head = NO_TRANSCRIPT
    while not state.finished:
        opened = next((a for a in actions if isinstance(a, OpenRound)), None)
        if opened is None:
            raise IntegrityError(f"no round after {state.round}", hint="choose an algorithm that asks every device")
        key = round_mask(fleet.fleet, plan, opened.plan.round)
        held = dataclasses.replace(opened.held, transcript=head, steps=_in_parts(opened.held.steps[-1:], cuts))
        head = transcript_of(held, plan, opened.plan.round, offers_of(opened.plan, held.states))
        items, stored = [], []
        for place, identity in enumerate(fleet.identities):
            assignment = opened.plan.assignments.get(identity.name)
            if assignment is None:
                continue
            update: Float32Vector = targets[place % GROUPS] * np.float32(STEP * scale_of(place))
            phase, precision = assignment.phase, plan.recipe.precision_up
            public = upload_seed(plan.run_id, opened.plan.round, phase, identity.name)
            encoded = encode_update(update, key, precision, public, cuts) if assignment.train else None
            body = [] if encoded is None else [encoded.body]
            upload = _upload(
                fleet, opened, assignment, (place, place % GROUPS), (key.key_id, head), plan.length if encoded else 0
            )
            header, *parts = seal_pieces(identity, plan, recipient, upload, body, [])
            items.append(Item(identity.name, header.transfer_id, header.payload))
            items += [Item(identity.name, part.transfer_id, part.payload, worker) for worker, part in enumerate(parts)]
            vector = None if encoded is None else encoded.masked
            stored.append(contribution_of(upload, vector, _norm(vector, cuts), digest=header.transfer_id))
        yield opened.plan.round, items
        for event in stored:
            state, actions = engine.handle(state, event)


def _norm(vector: Float32Vector | None, cuts: Sequence[tuple[int, int]]) -> float | None:
    """Return the norm that an aggregator with workers computes from those of the parts; None without workers."""
    from aggregator.shards.calculation import squared_norm

    if vector is None or not cuts:
        return None
    return math.sqrt(math.fsum(squared_norm(vector[start:stop]) for start, stop in cuts))


def _in_parts(steps: tuple[KeptStep, ...], cuts: Sequence[tuple[int, int]]) -> tuple[KeptStep, ...]:
    """Return steps whose means have the digests of means in float32 that workers hold in parts; as they are without workers."""

    def parted(mean: KeptMean) -> KeptMean:
        parts = [sha256(mean.vector[start:stop].tobytes()) for start, stop in cuts]
        return dataclasses.replace(mean, digest=digest_over(parts)) if parts else mean

    return tuple(dataclasses.replace(step, means=tuple(map(parted, step.means))) for step in steps)


def _upload(
    fleet: LoadFleet,
    opened: OpenRound,
    assignment: Assignment,
    device: tuple[int, int],
    ids: tuple[bytes, bytes],
    length: int,
) -> Upload:
    """Return the header of an upload of a ``device``, by place and group; ``ids`` are the mask's and the round's transcript."""
    plan, models, (key_id, head) = fleet.plan, opened.held, ids
    states = models.states.names.values()
    place, group = device
    choice = group % len(assignment.scored)
    margins = tuple(0.0 if c == 0 else 0.5 for c in range(len(assignment.candidates))) if assignment.margins else ()
    return Upload(
        fleet=plan.fleet,
        run=plan.run,
        run_id=plan.run_id,
        round=opened.plan.round,
        phase=assignment.phase,
        nonce=opened.nonce,
        device=fleet.names[place],
        recipient=aggregator_of(fleet.fleet.roster).seal_key,
        task_digest=plan.task_digest,
        mode=plan.recipe.mode,
        key_id=key_id,
        model=assignment.candidates[choice],
        samples=PREPARED_SAMPLES,
        loss=1.0,
        margins=margins,
        correct=1 if assignment.evaluate else 0,
        tested=2 if assignment.evaluate else 0,
        length=length,
        precision=plan.recipe.precision_up,
        model_norm=1.0 if assignment.norm else 0.0,
        key_version=models.key_version,
        statement=signed_statement(fleet.identities[place], plan, opened.plan.round, states, head),
    )


def signed_statement(identity: Identity, plan: RunPlan, round_: int, states: Iterable[StateId], head: bytes) -> bytes:
    """Return the statement of a device that holds ``states`` in a round with the transcript ``head``, signed by ``identity``."""
    held = tuple(
        HeldState(
            at.model, at.round, sha256(plan.run_id + at.model.to_bytes(4, "little") + at.round.to_bytes(4, "little"))
        )
        for at in sorted(states)
    )
    return sign_statement(
        identity, Statement(plan.fleet, plan.run_id, round_, identity.name, states=held, transcript=head)
    )


def _round_file(round_: int) -> str:
    return f"round-{round_:06d}"


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write prepared messages to a file that `read_items` reads."""
    with path.open("wb") as file:
        for item in items:
            name = item.device.encode()
            head = ITEM_HEAD.pack(len(name), item.receiver, len(item.payload), item.transfer)
            file.writelines((head, name, item.payload))


def read_items(path: Path) -> Iterator[Item]:
    """Yield the prepared messages of a file."""
    with path.open("rb") as file:
        while head := file.read(ITEM_HEAD.size):
            name_bytes, receiver, size, transfer = ITEM_HEAD.unpack(head)
            device = file.read(name_bytes).decode()
            yield Item(device, transfer, file.read(size), receiver)


class Replay:
    """The process that replays: one connection for all devices.

    Args:
        spec: ``joined``, the directory of a device that has joined; ``prepared``, that of the messages; ``devices``, how many.
    """

    def __init__(self, spec: SimpleNamespace) -> None:
        self._spec = spec
        self._member = DeviceMembership(Path(spec.joined))
        self._topics = Topics(self._member.fleet)
        self._inbox: queue.SimpleQueue[TransportEvent | None] = queue.SimpleQueue()
        self._transport = MqttTransport(
            self._member.broker, f"shoal-{self._member.fleet}-replay", self._inbox.put, session_expiry_s=0
        )
        self._stopped = False
        self._round = 0
        self._heard_s = 0.0
        self._answered: set[tuple[int, str]] = set()
        self._answers: list[tuple[str, bytes]] = []
        self._begun_s: dict[int, float] = {}
        self._answered_s: dict[int, float] = {}
        self._sent = self._again = 0

    def stop(self) -> None:
        """End `run` soon; may be called by a signal handler."""
        self._stopped = True
        self._inbox.put(None)

    def run(self) -> None:
        """Publish the presences, then each round's uploads when it is announced, until `stop` is called."""
        for topic_filter in (self._topics.filter(TopicKind.ROUND), self._topics.filter(TopicKind.CTL)):
            self._transport.subscribe(topic_filter)
        self._transport.start(require=True)
        while not self._stopped:
            with contextlib.suppress(queue.Empty):
                self._take(self._inbox.get(timeout=TICK_S))
            stalled = time.monotonic() - self._heard_s > STALLED_S
            if self._round and stalled and not self._transport.pending():
                self._again += self._publish_round(self._round, again=True)

    def _take(self, event: TransportEvent | None) -> None:
        if isinstance(event, Connected):
            self._publish_presences()
        if not isinstance(event, Message) or not event.payload:
            return
        self._heard_s = time.monotonic()
        header = parse(event.payload)[0]
        parsed = self._topics.parse(event.topic)
        if parsed.kind is TopicKind.CTL:
            self._answered.add((header.round, parsed.device))
            self._answered_s[header.round] = self._heard_s
            self._answers.append((event.topic, event.payload))
        # The last chunk of an announcement: devices could answer from here on. Its content is known already.
        elif header.kind is ChunkKind.ROUND and header.index == header.total - 1 and header.round > self._round:
            self._round = header.round
            self._sent += self._publish_round(header.round)

    def _publish_presences(self) -> None:
        for item in read_items(Path(self._spec.prepared, PRESENCES_FILE)):
            (chunk,) = split(item.payload, kind=channels.PRESENCE.kind, round=0)
            self._publish(self._topics.state(item.device), chunk, retain=True)

    def _publish_round(self, round_: int, *, again: bool = False) -> int:
        """Publish the uploads of a round, or ``again`` those that have no answer; return how many."""
        count = 0
        self._begun_s.setdefault(round_, time.monotonic())
        for item in read_items(Path(self._spec.prepared, _round_file(round_))):
            if again and (round_, item.device) in self._answered:
                continue
            whole = item.receiver == COORDINATOR
            count += whole
            topic = self._topics.up(item.device) if whole else self._topics.part(item.device, item.receiver)
            kind = (channels.UPLOAD if whole else channels.PART).kind
            size = self._transport.chunk_bytes
            chunks = split(item.payload, kind=kind, round=round_, chunk_bytes=size, name=item.transfer)
            first = not again and self._spec.devices * len(chunks) <= limits.RECEIVE_MAXIMUM
            qos: Qos = 0 if first else 1
            for chunk in chunks:
                self._publish(topic, chunk, qos=qos)
        self._heard_s = time.monotonic()
        return count

    def _publish(self, topic: str, chunk: bytes, *, retain: bool = False, qos: Qos = 1) -> None:
        while self._transport.pending() >= PENDING_MOST and not self._stopped:
            time.sleep(SHORT_SLEEP_S)
        self._transport.publish(topic, chunk, retain=retain, qos=qos)

    def report(self) -> dict[str, Any]:
        """Open the aggregator's answers and return the counts, and the seconds of each round from first upload to last answer."""
        nacks, chunks = 0, Reassembler()
        for topic, payload in self._answers:
            transfer = chunks.add(topic, payload, 0.0)
            if transfer is not None:
                purpose, plain = self._member.open_broadcast(transfer.payload, transfer.signed)
                nacks += purpose == channels.CONTROL.purpose and decode(plain, Control).action == Action.NACK
        spans_s = [self._answered_s[r] - begun_s for r, begun_s in self._begun_s.items() if r in self._answered_s]
        return {"uploads": self._sent, "nacks": nacks, "reminders": self._again, "spans_s": spans_s}


def main() -> None:
    """Replay the messages of the process's task."""
    spec = spec_of()
    drive(Replay(spec), spec.report)
