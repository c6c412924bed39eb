"""The aggregator's messages to its workers or its keeper, their answers, and who of them is there."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from aggregator.membership import AggregatorMembership
from aggregator.rounds.held_models import HeldModels, segment_name
from aggregator.status.facts import WorkerStatus
from aggregator.storage.store import OpenedUpload
from aggregator.strategies.base import RoundPlan
from crypto.seal.envelope import open_from_member, read_expected, seal_message_to_member
from crypto.seal.identity import open_document
from shoal import limits
from shoal.errors import UntrustedError
from shoal.membership.grants import KEEPER_ROLE, WORKER_ROLE
from shoal.protocol import channels
from shoal.protocol.cells import CellSums
from shoal.protocol.channels import Channel
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Member, RunPlan
from shoal.protocol.jobs import Job, JobDone, MeanOnBroker, PartReport, ShardOrder, StoredPart, WorkerPresence
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.sums import MOST_CELLS
from shoal.protocol.topics import ParsedTopic, TopicKind, Topics
from shoal.transport.base import Transport, publish_in_chunks

READ_TOPICS = (TopicKind.REPORT, TopicKind.WORKER_STATE)


class WorkerMessages:
    """Sends orders and jobs to the workers of a run, and reads what they send; nothing for a run without workers.

    Args:
        run: the owner's plan.
        membership: the coordinator's.
        transport: client of the broker.
        on_report: takes each report.
        plan: its run package, without task and origins.
        on_done: takes each answer to a job.
        on_sums: takes each answer of the keeper.
        clock: returns unix seconds.
    """

    def __init__(
        self,
        run: RunPlan,
        membership: AggregatorMembership,
        transport: Transport,
        on_report: Callable[[PartReport], None],
        plan: bytes = b"",
        on_done: Callable[[JobDone], None] = lambda _done: None,
        on_sums: Callable[[CellSums, memoryview], None] = lambda _told, _body: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._parties = run.workers if run.keeper is None else (run.keeper,)
        self._membership = membership
        self._transport = transport
        self._topics = Topics(run.fleet)
        self._chunks = Reassembler()
        self._on_report = on_report
        self._plan = plan
        self.on_done = on_done
        self._on_sums = on_sums
        self._clock = clock
        self._reported_s: dict[str, int] = {}
        self._births: dict[str, int] = {}
        self._online: set[str] = set()
        self._birth = time.time_ns()
        self._number = 0
        self._order: Callable[[int], ShardOrder] | None = None

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of the workers, or of the keeper, that are not connected."""
        return tuple(party.name for party in self._parties if party.name not in self._online)

    def facts(self, lacks: Mapping[int, int]) -> tuple[WorkerStatus, ...]:
        """Return the facts of each worker for `shoal-aggregator status`.

        Args:
            lacks: worker's number -> uploads whose parts it has not reported.
        """
        return tuple(
            WorkerStatus(
                name=worker.name,
                online=worker.name in self._online,
                last_report_s=self._reported_s.get(worker.name),
                lacking=lacks.get(number, 0),
                role=WORKER_ROLE if self._run.keeper is None else KEEPER_ROLE,
            )
            for number, worker in enumerate(self._parties)
        )

    def subscribe(self) -> None:
        """Subscribe to what the run's workers send."""
        for worker in self._parties:
            for kind in READ_TOPICS:
                self._transport.subscribe(self._topics.filter(kind, worker.name))

    def take(self, parsed: ParsedTopic, payload: bytes, now_s: float) -> None:
        """Take one chunk of a message on a topic of a worker.

        Raises:
            UntrustedError: the plan has no such worker, or the worker has not signed the message.
            WireError: malformed or too large.
        """
        worker = next((p for p in self._parties if p.name == parsed.label), None)
        if worker is None:
            raise UntrustedError(f"{parsed.label} is neither a worker nor the keeper of run {self._run.run}")
        self._chunks.expire(now_s)
        if parsed.kind is TopicKind.WORKER_STATE:
            transfer = self._chunks.add(f"{worker.name}/state", payload, now_s, channels.WORKER_STATE.limit())
            if transfer is not None:
                self._on_presence(worker, transfer)
            return
        allowed = {**channels.REPORT.limit(), **channels.JOB_DONE.limit()}
        if worker == self._run.keeper:
            allowed = channels.CELL_SUMS.limit(
                limits.SEALED_HEAD_BYTES * MOST_CELLS + MOST_CELLS * 4 * self._run.length
            )
        transfer = self._chunks.add(worker.name, payload, now_s, allowed)
        if transfer is not None:
            self._on_sealed(worker, transfer)

    def _on_presence(self, worker: Member, transfer: Transfer) -> None:
        told = open_document(transfer.payload, WorkerPresence, worker.sign_key)
        if (told.fleet, told.worker) != (self._run.fleet, worker.name):
            raise UntrustedError(f"the presence of {told.worker!r} on {worker.name}'s topic")
        if told.birth < self._births.get(worker.name, 0):
            return
        self._births[worker.name] = told.birth
        if not told.online:
            self._online.discard(worker.name)
            return
        self._online.add(worker.name)
        # It may have missed the newest order, or be asked for the first time.
        if self._order is not None:
            number = self._parties.index(worker)
            self._send(number, channels.SHARD_ORDER, encode(self._order(number)))

    def _on_sealed(self, worker: Member, transfer: Transfer) -> None:
        channel = channels.channel_at(TopicKind.REPORT, transfer.kind)
        identity = self._membership.identity
        wanted = channel.head(self._run.fleet, worker.name, identity.name)
        head, at = read_expected(transfer.payload, wanted, f"a message of {worker.name}")
        message, body = open_from_member(identity, transfer.payload, head, at, worker.sign_key, transfer.signed)
        if channel is channels.CELL_SUMS:
            self._reported_s[worker.name] = int(self._clock())
            self._on_sums(decode(message, CellSums), body)
            return
        number = self._run.workers.index(worker)
        told: PartReport | JobDone
        told = decode(message, PartReport) if channel is channels.REPORT else decode(message, JobDone)
        if (told.run_id, told.worker) != (self._run.run_id, number):
            raise UntrustedError(f"a report of worker {told.worker} by {worker.name}, or of another run")
        self._reported_s[worker.name] = int(self._clock())
        if isinstance(told, PartReport):
            self._on_report(told)
        else:
            self.on_done(told)

    def order(self, plan: RoundPlan, nonce: bytes, held: HeldModels, *, finished: bool = False) -> None:
        """Tell the workers about the open round, and which parts of means to publish. Call it before the announcement."""
        self._number += 1
        number, run = self._number, self._run
        devices = tuple(d for d, assignment in sorted(plan.assignments.items()) if assignment.train)
        means = [
            (kept.step.round, mean, segment_name(mean.model, sharing=plan.shared is not None))
            for kept in held.steps
            for mean in kept.means
            if mean.parts
        ]

        def of(worker: int) -> ShardOrder:
            return ShardOrder(
                run_id=run.run_id,
                birth=self._birth,
                number=number,
                round=plan.round,
                nonce=nonce,
                key_version=held.key_version,
                # The snapshot of this round may not be durable yet: after a crash the one before closes again.
                keep=max(1, plan.round - 1),
                devices=devices,
                means=tuple(
                    MeanOnBroker(
                        model=mean.model,
                        round=round_,
                        key_id=mean.key_id,
                        length=_length(run, segment),
                        segment=segment,
                        digest=mean.parts[worker],
                    )
                    for round_, mean, segment in means
                ),
                plan=self._plan,
                finished=finished,
            )

        if not run.workers:
            return
        self._order = of
        for worker in range(len(run.workers)):
            self._send(worker, channels.SHARD_ORDER, encode(of(worker)))

    def ask_keeper(self, request: bytes) -> None:
        """Send an encoded `OpenCells`; any thread may call it."""
        self._send(0, channels.OPEN_CELLS, request)

    def job(self, worker: int, job: Job) -> None:
        """Send a job to a worker; any thread may call it."""
        self._send(worker, channels.JOB, encode(job))

    def _send(self, number: int, channel: Channel, message: bytes) -> None:
        worker = self._parties[number]
        identity = self._membership.identity
        head = channel.head(self._run.fleet, identity.name, worker.name)
        parcel = seal_message_to_member(identity, worker.seal_key, head, message)
        publish_in_chunks(
            self._transport,
            self._topics.at(TopicKind.JOB, worker.name),
            parcel.payload,
            channel.kind,
            parcel.transfer_id,
        )


def _length(run: RunPlan, segment: str) -> int:
    span = run.span(segment)
    return int(span.stop - span.start)


def waiting_words(run: RunPlan, absent: tuple[str, ...], lacks: Mapping[int, int]) -> str:
    """Return which workers a round waits for; empty if none."""
    if absent:
        return f"{'worker' if run.keeper is None else 'the keeper'} {', '.join(absent)} is not connected"
    late = [f"{run.workers[number].name} ({count})" for number, count in sorted(lacks.items())]
    return f"parts not reported by {', '.join(late)}" if late else ""


class PartsGate:
    """The uploads of the open round that wait for reports, at most one of each device, and the reports that came first.

    Attributes:
        held: the uploads that wait, by device.
    """

    def __init__(self) -> None:
        self.held: dict[str, OpenedUpload] = {}
        self._reported: dict[tuple[str, int], StoredPart] = {}
        self._round = 0

    def hold(self, upload: OpenedUpload) -> OpenedUpload | None:
        """Take an upload; return it with its norm if all its parts are reported already, and unchanged if it has none."""
        if not upload.header.parts:
            return upload
        self.held[upload.ref.device] = upload
        return self._complete(upload.ref.device)

    def report(self, report: PartReport) -> list[OpenedUpload]:
        """Take a worker's report; return the uploads that it completes, each with its norm."""
        if report.round > self._round:
            self._round, self._reported = report.round, {}
        elif report.round < self._round:
            return []
        for part in report.parts:
            self._reported[(part.device, report.worker)] = part
        found = (self._complete(part.device) for part in report.parts)
        return [upload for upload in found if upload is not None]

    def lacks(self, workers: int) -> dict[int, int]:
        """Return worker -> number of uploads that wait for its report."""
        found: dict[int, int] = {}
        for device, upload in self.held.items():
            for worker in range(workers):
                part = self._reported.get((device, worker))
                if part is None or part.digest != upload.header.parts[worker]:
                    found[worker] = found.get(worker, 0) + 1
        return found

    def _complete(self, device: str) -> OpenedUpload | None:
        upload = self.held.get(device)
        if upload is None:
            return None
        parts = [self._reported.get((device, worker)) for worker in range(len(upload.header.parts))]
        squares = []
        for part, digest in zip(parts, upload.header.parts, strict=True):
            if part is None or (part.digest, part.phase) != (digest, upload.header.phase):
                return None
            squares.append(part.squared_norm)
        del self.held[device]
        return dataclasses.replace(upload, norm=math.sqrt(math.fsum(squares)))
