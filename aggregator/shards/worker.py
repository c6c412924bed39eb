"""One worker of a run on a transport: takes parts of updates, reports them, carries out jobs, publishes parts of means.

Like `aggregator.run_service.RunService` it owns no thread and reads no clock: a driver calls `on_event`, `flush` and `tick`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.checks import NumericsError
from aggregator.owner_inbox import GrantInbox
from aggregator.shards.calculation import PartCalculator, ShardsUnavailableError, squared_norm
from aggregator.shards.membership import WorkerMembership, presence_of
from aggregator.shards.part_store import PartStore
from crypto.seal.envelope import open_from_member, read_expected, seal_message_to_group
from shoal import limits
from shoal.errors import ShoalError, UntrustedError, WireError
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPlan
from shoal.protocol.jobs import (
    GroupAddress,
    Job,
    JobDone,
    JobKind,
    PartReport,
    ShardOrder,
    StoredPart,
)
from shoal.protocol.messages import Action, Control, Reminder
from shoal.protocol.precision.codec import decode as decode_vector
from shoal.protocol.precision.codec import encode as encode_vector
from shoal.protocol.precision.seeds import mean_seed
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.shards import (
    PART_LABEL,
    MeanPartHeader,
    UploadPart,
    borders,
    mean_part_number,
    part_bytes,
    part_seed,
    sealed_part_bytes,
)
from shoal.protocol.states import mean_number
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Message, Transport, TransportEvent, publish_in_chunks
from shoal.transport.retained import RetainedPublisher
from shoal.util.log_throttle import Refusals

LOG = logging.getLogger("shoal.worker")
CONTROL_BYTES: Final = 768
"""Upper bound for the size of a sealed request for chunks without their list."""
STALLED_S: Final = limits.REASSEMBLY_QUIET_S

Blocks = Iterator[NDArray[np.float64]]
SendBlocks = Callable[[Job, Callable[[], Blocks] | None], None]
"""Sends the blocks of a job to the coordinator, or says that there are none; the calculation may run on another thread. Of a MEET
it takes the addresses."""


def read_order(membership: WorkerMembership, transfer: Transfer) -> ShardOrder:
    """Return the order in a transfer.

    Raises:
        UntrustedError: it is not from the coordinator.
        WireError: it is no order.
    """
    return decode(membership.open_job(transfer)[1], ShardOrder)


class WorkerService:
    """Drives one worker of one run.

    Args:
        membership: its keys and the roster.
        run: the owner's plan, which names this worker.
        transport: client of the broker.
        directory: the worker's.
        birth: grows with every start of the worker.
        send_blocks: sends sums to the coordinator; None in one process, where the coordinator calls `blocks`.
        other_run: takes an order of a later run; None refuses it.

    Attributes:
        number: of the worker in the plan.

    Raises:
        UntrustedError: the plan names no worker with these keys.
    """

    def __init__(
        self,
        membership: WorkerMembership,
        run: RunPlan,
        transport: Transport,
        directory: Path,
        *,
        birth: int,
        send_blocks: SendBlocks | None = None,
        other_run: Callable[[ShardOrder], None] | None = None,
    ) -> None:
        member = membership.identity.member
        if member not in run.workers:
            raise UntrustedError(
                f"run {run.run} has no worker {member.name!r} with these keys",
                hint="shoal-fleet add-worker, then sign a new run",
            )
        self.number = run.workers.index(member)
        self.run = run
        self._part = borders(run.length, len(run.workers))[self.number]
        self._membership = membership
        self._transport = transport
        self._topics = Topics(run.fleet)
        self._store = PartStore(directory / f"run-{run.run:06d}", run, self._part[1] - self._part[0])
        self._chunks = Reassembler()
        self._retained = RetainedPublisher(transport)
        self._published: dict[str, tuple[int, bytes, int]] = {}
        self._inbox = GrantInbox(membership)
        self._send_blocks = send_blocks
        self._other_run = other_run
        self._birth = birth
        self._order = self._store.order
        self._refusals = Refusals(LOG)
        self._now_s = 0.0

    @property
    def finished(self) -> bool:
        """Whether the coordinator has said that the run is over."""
        return self._order is not None and self._order.finished

    def start(self, now_s: float) -> None:
        """Subscribe, and publish what was published before a restart."""
        self._now_s = now_s
        transport, name = self._transport, self._membership.identity.name
        self._inbox.subscribe(transport)
        transport.subscribe(self._topics.filter(TopicKind.ROSTER))
        transport.subscribe(self._topics.parts(self.number))
        transport.subscribe(self._topics.filter(TopicKind.JOB, name))
        if self._order is not None:
            self._use(self._order)
        self.tell_presence()

    def tell_presence(self) -> None:
        """Publish that the worker is online; the coordinator answers with its newest order."""
        self._transport.publish(*presence_of(self._membership, self._birth, online=True), retain=True)

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Handle one event of the transport; a message that is refused is logged and changes nothing else."""
        self._now_s = now_s
        match event:
            case Message(topic, payload):
                try:
                    if payload and not self._inbox.take(topic, payload, now_s):
                        self._on_message(topic, payload)
                except ShoalError as error:
                    self._refusals.tell(topic, error, now_s)
            case Connected():
                self._retained.republish()
                self.tell_presence()

    def _on_message(self, topic: str, payload: bytes) -> None:
        parsed = self._topics.parse(topic)
        match parsed.kind:
            case TopicKind.PART:
                self._on_part(parsed.device, payload)
            case TopicKind.JOB:
                allowed = {**channels.JOB.limit(), **channels.SHARD_ORDER.limit()}
                transfer = self._chunks.add("job", payload, self._now_s, allowed)
                if transfer is not None:
                    self._on_job(transfer)
            case TopicKind.ROSTER:
                transfer = self._chunks.add("roster", payload, self._now_s, channels.ROSTER.limit())
                if transfer is not None:
                    self._membership.take_roster(transfer)
            case _:
                raise UntrustedError(f"a message on {parsed.kind.base}, which a worker does not read")

    # --------------------------------------------------------------------------------------------------------- parts

    def _on_part(self, device: str, payload: bytes) -> None:
        member = self._membership.roster.device(device)
        if member is None:
            raise UntrustedError(f"{device} is not in the roster")
        allowed = {
            **channels.PART.limit(sealed_part_bytes(self.run, self.number)),
            **channels.PART_REMINDER.limit(),
        }
        transfer = self._chunks.add(device, payload, self._now_s, allowed)
        if transfer is None:
            return
        channel = channels.channel_at(TopicKind.PART, transfer.kind)
        identity = self._membership.identity
        wanted = channel.head(self.run.fleet, device, identity.name)
        head, at = read_expected(transfer.payload, wanted, f"a part of {device}")
        message, body = open_from_member(identity, transfer.payload, head, at, member.sign_key, transfer.signed)
        if channel is channels.PART_REMINDER:
            self._on_reminder(decode(message, Reminder), device)
        else:
            self._take_part(decode(message, UploadPart), body, device, transfer.signed)

    def _take_part(self, header: UploadPart, body: memoryview, device: str, digest: bytes) -> None:
        order = self._order
        ours = (self.run.fleet, self.run.run_id, device, self._membership.identity.member.seal_key, self.number)
        if (header.fleet, header.run_id, header.device, header.recipient, header.worker) != ours:
            raise UntrustedError("a part for another run or worker, or of another device")
        if order is None or (header.round, header.nonce) != (order.round, order.nonce) or device not in order.devices:
            raise UntrustedError(f"a part of {device} for round {header.round}, which is not open for it")
        if len(body) != part_bytes(self.run, self.number):
            raise WireError(f"a part of {len(body)} bytes")
        known = self._store.stored(header.round, device, digest)
        if known:
            self._report(header.round, known)
            return
        vector = self._decoded(body)
        squared = squared_norm(vector)
        if not np.isfinite(squared):
            raise UntrustedError(f"the part of {device} holds NaN or infinities")
        stored = StoredPart(device, header.phase, digest, squared)
        self._store.write(header.round, stored, vector.data.cast("B"))

    def _decoded(self, body: memoryview) -> NDArray[np.float32]:
        length = self._part[1] - self._part[0]
        if self.run.recipe.precision_up == "float32":
            return np.frombuffer(body, "<f4", length)
        return np.ascontiguousarray(decode_vector(body, length, self.run.recipe.precision_up), "<f4")

    def _on_reminder(self, reminder: Reminder, device: str) -> None:
        """Report the part again if it is stored, or ask for its missing chunks."""
        if (reminder.fleet, reminder.device, reminder.run_id) != (self.run.fleet, device, self.run.run_id):
            raise UntrustedError("a reminder of another run or device")
        order = self._order
        if order is None or reminder.round != order.round or order.finished:
            return
        known = self._store.stored(reminder.round, device, reminder.digest)
        if known:
            self._report(reminder.round, known)
            return
        missing = self._chunks.missing(
            device,
            reminder.round,
            reminder.transfer,
            reminder.size,
            reminder.chunk_bytes,
            self._now_s,
            kind=ChunkKind.PART,
        )
        self._ask_again(device, reminder.round, reminder.transfer, missing)

    def _ask_again(self, device: str, round_: int, transfer: bytes, missing: tuple[int, ...]) -> None:
        control = Control(
            fleet=self.run.fleet,
            device=device,
            action=Action.NACK,
            run=self.run.run,
            round=round_,
            transfer=transfer,
            missing=missing[: (self._transport.chunk_bytes - CONTROL_BYTES) // 4],
            reason="chunks missing",
        )
        head = channels.PART_CONTROL.head(self.run.fleet, self._membership.identity.name, device)
        parcel = seal_message_to_group(self._membership.identity, self._membership.group, head, encode(control))
        publish_in_chunks(
            self._transport,
            self._topics.at(TopicKind.PART_CTL, device),
            parcel.payload,
            channels.PART_CONTROL.kind,
            parcel.transfer_id,
            round_,
        )

    def flush(self, now_s: float) -> None:
        """Make the parts that arrived durable, and report them."""
        self._now_s = now_s
        if self._store.waiting:
            done = self._store.commit()
            for round_ in sorted({round_ for round_, _ in done}):
                self._report(round_, [part for at, part in done if at == round_])

    def tick(self, now_s: float) -> None:
        """Request the missing chunks of stalled parts, and drop transfers that take too long."""
        self._now_s = now_s
        for stalled in self._chunks.stalled(now_s, STALLED_S):
            if stalled.kind is ChunkKind.PART:
                self._ask_again(stalled.source, stalled.round, stalled.transfer_id, stalled.missing)
        self._chunks.expire(now_s)

    def _report(self, round_: int, parts: list[StoredPart]) -> None:
        self._membership.send(
            self._transport, channels.REPORT, encode(PartReport(self.run.run_id, self.number, round_, tuple(parts)))
        )

    # ---------------------------------------------------------------------------------------------------------- jobs

    def _on_job(self, transfer: Transfer) -> None:
        channel, message = self._membership.open_job(transfer)
        if channel is channels.SHARD_ORDER:
            order = decode(message, ShardOrder)
            if order.run_id != self.run.run_id and self._other_run is not None:
                self._other_run(order)
            else:
                self.take_order(order)
            return
        job = decode(message, Job)
        if job.run_id != self.run.run_id:
            raise UntrustedError("a job of another run")
        if job.kind is JobKind.MEANS:
            self._membership.send(self._transport, channels.JOB_DONE, encode(self.answer(job)))
        elif self._send_blocks is not None:
            if job.kind is JobKind.MEET:
                self._send_blocks(job, None)
                return
            lacking = self._store.lacking(job.round, job.devices, job.digests)
            if lacking:
                facts = {"round": job.round, "devices": ", ".join(lacking[:3])}
                LOG.error("acknowledged parts are not here", extra={"kv": facts})
                self._send_blocks(job, None)
                return
            calculator = self._calculator(job)  # reads the database, which belongs to this thread
            self._send_blocks(job, calculator.blocks)

    def tell_address(self, address: GroupAddress) -> None:
        """Send the address of this worker in a process group to the coordinator; any thread may call it."""
        self._membership.send(
            self._transport, channels.JOB_DONE, encode(JobDone(self.run.run_id, self.number, 0, addresses=(address,)))
        )

    def blocks(self, job: Job) -> Blocks:
        """Return this worker's share of a job's sums.

        Raises:
            UntrustedError: a part that the job needs is not here.
        """
        lacking = self._store.lacking(job.round, job.devices, job.digests)
        if lacking:
            raise UntrustedError(
                f"worker {self.number} lacks the parts of {', '.join(lacking[:3])} in round {job.round}"
            )
        return self._calculator(job).blocks()

    def answer(self, job: Job) -> JobDone:
        """Make and store the parts of means; return the answer to the coordinator."""
        lacking = self._store.lacking(job.round, job.devices, job.digests)
        if lacking:
            return JobDone(self.run.run_id, self.number, job.number, lacking=lacking)
        try:
            calculator = self._calculator(job)
            digests = []
            for place, vector in enumerate(calculator.vectors()):
                mean = job.means[place]
                body = self._encoded(job.round, mean.model, np.asarray(vector))
                digests.append(self._store.write_mean(job.round, body))
        except NumericsError as error:
            return JobDone(self.run.run_id, self.number, job.number, error=str(error))
        return JobDone(self.run.run_id, self.number, job.number, tuple(digests))

    def _calculator(self, job: Job) -> PartCalculator:
        return PartCalculator(job, self._part, self._store.reader(job.round))

    def _encoded(self, round_: int, model: int, vector: NDArray[np.float32]) -> bytes:
        if not np.isfinite(vector).all():
            raise NumericsError("the mean is not finite")
        if self.run.recipe.precision_down == "float32" or not len(vector):
            return np.ascontiguousarray(vector, "<f4").tobytes()
        seed = part_seed(mean_seed(self.run.run_id, round_, model), self.number)
        return bytes(encode_vector(vector, self.run.recipe.precision_down, seed))

    def take_order(self, order: ShardOrder) -> None:
        """Put the coordinator's newest order in force; an older one, which a broker may repeat, has no effect."""
        if order.run_id != self.run.run_id:
            raise UntrustedError("an order of another run")
        known = self._order
        if known is not None and (order.birth, order.number) <= (known.birth, known.number):
            return
        self._store.keep_order(order)
        self._order = order
        self._use(order)

    def _use(self, order: ShardOrder) -> None:
        """Publish the parts of means that an order names, and remove all others from the broker."""
        self._membership.use_version(order.key_version)
        group = self._membership.group
        keep = set()
        for mean in order.means:
            number = mean_part_number(mean_number(mean.model, mean.round), self.number)
            base = self._topics.at(TopicKind.MEAN_PART, f"{PART_LABEL}{group.topic_label(self.run.run_id, number)}")
            keep.add(base)
            if self._published.get(base) == (mean.round, mean.digest, order.key_version):
                continue
            header = MeanPartHeader(
                fleet=self.run.fleet,
                run_id=self.run.run_id,
                round=mean.round,
                key_id=mean.key_id,
                model=mean.model,
                length=mean.length,
                segment=mean.segment,
                worker=self.number,
            )
            plain = encode(header), self._store.mean(mean.round, mean.digest)
            head = channels.MEAN_PART.head(self.run.fleet, self._membership.identity.name)
            parcel = seal_message_to_group(self._membership.identity, group, head, *plain)
            self._retained.publish(
                base, parcel.payload, kind=channels.MEAN_PART.kind, round_=mean.round, name=parcel.transfer_id
            )
            self._published[base] = mean.round, mean.digest, order.key_version
        for base in self._retained.bases():
            if base not in keep:
                self._retained.clear(base)
                self._published.pop(base, None)

    def close(self) -> None:
        """Close the store; retained messages stay on the broker."""
        self._store.close()


class LocalLink:
    """Calls the workers (`aggregator.shards.calculation.JobLink`).

    Args:
        workers: returns the worker of each number; None for one that is not running.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerService | None]]) -> None:
        self._workers = workers

    def sums(self, jobs: Sequence[Job]) -> Iterator[NDArray[np.float64]]:
        """Yield the sums of the workers' blocks."""
        try:
            blocks = [worker.blocks(_sent(job)) for worker, job in zip(self._running(), jobs, strict=True)]
        except UntrustedError as error:
            raise ShardsUnavailableError(str(error)) from error
        for parts in zip(*blocks, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            yield total

    def answers(self, jobs: Sequence[Job]) -> list[JobDone]:
        """Return the workers' answers to a job of means."""
        return [worker.answer(_sent(job)) for worker, job in zip(self._running(), jobs, strict=True)]

    def _running(self) -> list[WorkerService]:
        found = list(self._workers())
        missing = [f"worker {number}" for number, worker in enumerate(found) if worker is None]
        if missing:
            raise ShardsUnavailableError(f"{', '.join(missing)} not running", missing)
        return [worker for worker in found if worker is not None]


def _sent(job: Job) -> Job:
    """Return the job as its worker decodes it."""
    return decode(encode(job), Job)
