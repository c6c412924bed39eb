"""`shoal bench aggregator`: CPU time of a round of many devices in the aggregator's service.

No device runs: presences and uploads are made beforehand, by as many identities as there are devices, and are handed to the
service that the daemon drives, on a loopback broker without other clients. Seals and signatures are checked, updates are
durable before they are answered, and the strategy closes the round. Statements name stand-ins of digests
(`shoal_lab.bench.load.statements`).

It leaves out the daemon's event queue, MQTT and the broker, acknowledgements on the wire, reminders and all waiting.
`shoal bench load` (`shoal_lab.bench.load.measurement`) measures those, with the real processes.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from aggregator import membership as aggregators
from aggregator.membership import AggregatorMembership
from aggregator.numerics.backend import select
from aggregator.run_service import RunService
from crypto.seal.envelope import open_from_group, read_head, seal_message_to_member, seal_to_group
from crypto.seal.identity import Identity
from crypto.seal.receiving import ReceivingSecrets
from crypto.seal.signed import sign_document
from shoal.errors import UsageError
from shoal.membership.grants import DEVICE_ROLE, make_card
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import RunOptions, make_plan, write_run
from shoal.owner.task_compiler.builtin import build
from shoal.owner.task_compiler.compile import compile_task
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import NO_ASSIGNMENT, Announcement, Assignment, Presence, Upload
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind, Topics, matches
from shoal.transport.base import Message
from shoal.transport.inbox import BATCH_EVENTS
from shoal.transport.loopback import LoopbackBroker, LoopbackTransport
from shoal_lab.bench.load.statements import signed_statement

ROUNDS: Final = 4
"""Measured rounds; the first is left out, since it also creates the store."""
SIZES: Final = (100, 1000, 5000)
STEP_S: Final = 1e-3
"""Seconds by which the service's clock advances with each message."""
KEY_ID: Final = b"a round's mask  "
"""Key id of all uploads: the aggregator compares the ids of a round and can't derive one."""
INPUTS: Final = 784
CLASSES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Results of the benchmark, in CPU seconds of this process, on one thread.

    Attributes:
        presences_s: handling the presences of all devices, up to the announcement of the first round.
        rounds_s: each later round, from the first upload's first chunk to the announcement of the next.
        update_bytes: size of one masked update.
        published_bytes: bytes published in a round: models, announcement and answers, each counted once.
    """

    devices: int
    algorithm: str
    update_bytes: int
    presences_s: float
    rounds_s: tuple[float, ...]
    published_bytes: int

    def data(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        seconds = median(self.rounds_s)
        return {
            "devices": self.devices,
            "algorithm": self.algorithm,
            "update_bytes": self.update_bytes,
            "cpu_ms_per_presence": 1e3 * self.presences_s / self.devices,
            "cpu_seconds_per_round": seconds,
            "cpu_ms_per_upload": 1e3 * seconds / self.devices,
            "published_bytes_per_round": self.published_bytes,
        }


class Crowd:
    """A fleet whose devices are keys in one process, and its aggregator's service."""

    def __init__(self, root: Path, devices: int, algorithm: str) -> None:
        self._members = [Identity.generate(f"dev-{i:05}") for i in range(devices)]
        fleet = FleetDirectory.create(root / "owner", "crowd", "mqtt://loopback")
        card = aggregators.init(root / "server")
        fleet.add_aggregator(card.read_bytes())
        fleet.add_device(make_card(self._members[0], DEVICE_ROLE, ReceivingSecrets.generate().public))
        grant = fleet.add_aggregator(card.read_bytes())
        member = aggregators.join(root / "server", grant.read_bytes(), fleet.fingerprint)
        made = build("logistic", inputs=INPUTS, classes=CLASSES)
        bundle = compile_task(made.model, made.loss, made.example, name="logistic", kind=made.kind, hyper=made.hyper)
        settings = {"k": "4", "restarts": "1"} if algorithm == "ifca" else {}
        options = RunOptions(algorithm, settings, rounds=ROUNDS, quorum=1.0, min_contributors=1)
        self.plan = make_plan(fleet, bundle, options)
        origins = np.zeros((self.plan.origins, self.plan.length), np.float32)
        package = write_run(fleet, self.plan, bundle, origins).read_bytes()
        # One signature over all devices, instead of one for each `add_device`.
        roster = dataclasses.replace(
            fleet.roster, sequence=fleet.roster.sequence + 1, devices=tuple(m.member for m in self._members)
        )
        member.adopt(sign_document(fleet.owner, roster))
        self._member: AggregatorMembership = member
        self._topics = Topics(fleet.name)
        self._broker = LoopbackBroker()
        self._transport = LoopbackTransport(self._broker, "aggregator", lambda _event: None)
        work = 2.0 * devices**2 * self.plan.length
        self._service = RunService(
            member, self.plan, package, self._transport, root / "server", backend=select("cpu", work_flops=work)
        )
        self._now_s = 0.0
        self._transport.start()
        self._service.start(0.0)
        self._vector = np.random.default_rng(0).standard_normal(self.plan.length).astype("<f4") / 100

    def presences(self) -> list[Message]:
        """Return the presence messages of all devices."""
        fleet, group = self._member.fleet, self._member.group
        made = []
        for one in self._members:
            head = channels.PRESENCE.head(fleet, one.name)
            plain = encode(Presence(fleet, one.name, 1, online=True))
            (chunk,) = split(seal_to_group(one, group, head, plain), kind=channels.PRESENCE.kind, round=0)
            made.append(Message(self._topics.state(one.name), chunk))
        return made

    def uploads(self) -> list[Message]:
        """Return the uploads of all devices that have an order in the open round."""
        announcement = self.announced()
        made: list[Message] = []
        for one, place in zip(self._members, announcement.assignment_of, strict=True):
            if place != NO_ASSIGNMENT:
                made += self._upload(one, announcement, announcement.assignments[place])
        return made

    def _upload(self, one: Identity, announcement: Announcement, assignment: Assignment) -> Iterable[Message]:
        plan, server, models = self.plan, self._member.identity.member, announcement.held
        values = (self._vector + np.float32(1e-3) * np.float32(int(one.name[-2:]))).astype("<f4")
        body = values.tobytes() if assignment.train else b""
        upload = Upload(
            fleet=plan.fleet,
            run=plan.run,
            run_id=plan.run_id,
            round=announcement.round,
            phase=assignment.phase,
            nonce=announcement.nonce,
            device=one.name,
            recipient=server.seal_key,
            task_digest=plan.task_digest,
            mode=plan.mode,
            key_id=KEY_ID,
            model=assignment.candidates[0],
            samples=10,
            loss=1.0,
            margins=(0.0,) * len(assignment.candidates) if assignment.margins else (),
            correct=1 if assignment.evaluate else 0,
            tested=2 if assignment.evaluate else 0,
            length=len(body) // 4,
            key_version=models.key_version,
            statement=signed_statement(
                one, plan, announcement.round, {offer.at for offer in models.offers}, models.transcript
            ),
        )
        head = channels.UPLOAD.head(plan.fleet, one.name, server.name)
        parcel = seal_message_to_member(one, server.seal_key, head, encode(upload), body)
        topic = self._topics.up(one.name)
        chunks = split(parcel.payload, kind=channels.UPLOAD.kind, round=announcement.round, name=parcel.transfer_id)
        return (Message(topic, chunk) for chunk in chunks)

    def announced(self) -> Announcement:
        """Return the newest announcement.

        Raises:
            UsageError: there is none.
        """
        chunks = Reassembler()
        held = (
            p
            for topic, p in self._broker.retained.items()
            if p and matches(self._topics.filter(TopicKind.ROUND), topic)
        )
        sealed = next((t.payload for p in held if (t := chunks.add("round", p, 0.0)) is not None), None)
        if sealed is None:
            raise UsageError("no round was announced")
        head, at = read_head(sealed)
        key = self._member.identity.member.sign_key
        return decode(open_from_group(self._member.group, sealed, head, at, key), Announcement)

    def take(self, messages: list[Message]) -> float:
        """Hand messages to the service as its daemon would; return CPU seconds."""
        begin = time.process_time()
        for first in range(0, len(messages), BATCH_EVENTS):
            for message in messages[first : first + BATCH_EVENTS]:
                self._now_s += STEP_S
                self._service.on_event(message, self._now_s)
            self._service.flush(self._now_s)
            self._service.tick(self._now_s)
        spent = time.process_time() - begin
        self._broker.pump()  # the loopback broker's work is not the aggregator's
        return spent

    @property
    def published_bytes(self) -> int:
        """Bytes that the aggregator has published so far."""
        return self._transport.bytes_sent

    def close(self) -> None:
        """Close the service's files."""
        self._service.close()


def measure(devices: int, algorithm: str = "fedavg") -> Load:
    """Measure the aggregator's CPU time for presences and rounds of a fleet of ``devices`` devices."""
    with tempfile.TemporaryDirectory(prefix="shoal-load-") as folder:
        crowd = Crowd(Path(folder), devices, algorithm)
        try:
            presences_s = crowd.take(crowd.presences())
            rounds_s, published = [], []
            for round_ in range(1, ROUNDS + 1):
                if crowd.announced().round != round_:
                    raise UsageError(f"round {round_} did not open")
                before = crowd.published_bytes
                rounds_s.append(crowd.take(crowd.uploads()))
                published.append(crowd.published_bytes - before)
        finally:
            crowd.close()
    return Load(
        devices=devices,
        algorithm=algorithm,
        update_bytes=4 * crowd.plan.length,
        presences_s=presences_s,
        rounds_s=tuple(rounds_s[1:]),
        published_bytes=published[1],
    )
