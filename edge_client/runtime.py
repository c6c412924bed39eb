"""One device on a transport: carries out what the agent decides. Owns no thread and reads no clock.

Drivers feed `on_event`, `on_result` and `tick`; the program does so from a queue with the real clock, the loopback
fleet with virtual time and an inline worker.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from crypto.seal.roster import aggregator_of
from edge_client import agent, kept
from edge_client.agent import AgentState
from edge_client.data import Batch, Shares, split
from edge_client.enrolment import DeviceMembership
from edge_client.inventory import Inventory
from edge_client.manifest import TaskManifest
from edge_client.model import OrtModel
from edge_client.package import Run, open_plan, open_run
from edge_client.presence import presence
from edge_client.state import DeviceState, OwnModel
from edge_client.update import Finished, Workshop, carry_out
from edge_client.worker import Result, Worker
from wire import limits
from wire.codec import decode
from wire.errors import IntegrityError, ShoalError, UntrustedError
from wire.frame import ChunkKind
from wire.frame import split as split_chunks
from wire.messages import Action, Announcement, Control, Order
from wire.reassembly import Reassembler
from wire.topics import TopicKind, Topics
from wire.transport import Connected, Disconnected, Message, Transport, TransportEvent
from wire.types import Float32Vector

LOG = logging.getLogger("shoal.edge")
REFETCH_S: Final = 5.0
"""A device that has waited this long for a model subscribes anew: the broker then sends what it retains."""
STATUS_EVERY_S: Final = 1.0
SAVE_MODEL_EVERY_S: Final = 30.0
RUNS_REMEMBERED: Final = 16


class DeviceRuntime:
    """Drives one device.

    Attributes:
        runs_done: how many runs the device has seen to their end.
    """

    def __init__(
        self,
        membership: DeviceMembership,
        transport: Transport,
        worker: Worker,
        load_data: Callable[[TaskManifest], Batch],
        *,
        birth: int,
        results: Callable[[Callable[[], None]], None],
        uniform: Callable[[], float],
        threads: int = 1,
    ) -> None:
        """Take up the device's state.

        Args:
            membership: keys and fleet.
            transport: not started yet.
            worker: carries out orders.
            load_data: gives the device's samples in a task's shapes.
            birth: of this life, see `presence`.
            results: hands a callback from the worker back to the driver's own thread.
            uniform: draws from [0, 1), for jitter.
            threads: of ONNX Runtime.
        """
        self._membership = membership
        self._transport = transport
        self._worker = worker
        self._load_data = load_data
        self._birth = birth
        self._results = results
        self._uniform = uniform
        self._threads = threads
        self._topics = Topics(membership.fleet)
        self._files = DeviceState(membership.directory)
        self._chunks = Reassembler()
        pending = self._files.load_pending()
        sent = (pending.mark.run, pending.mark.round, pending.mark.nonce) if pending.sealed else None
        self._state = AgentState(membership.index, pending.mark, transfer=pending.transfer, sent=sent)
        self._sealed = pending.sealed
        self._run: Run | None = None
        self._package = b""
        self._workshop: Workshop | None = None
        self._shares: tuple[bytes, Shares] | None = None
        self._held: Announcement | None = None
        self._models: Inventory | None = None
        self._labels: tuple[str, ...] = ()
        self._own: OwnModel | None = None
        self._timer_s: float | None = None
        self._fetching_s = 0.0
        self._saved_model_s = self._saved_status_s = -math.inf
        self._figures: dict[str, Any] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self._base = (0, 0)
        self._now_s = 0.0
        self.runs_done = 0

    @property
    def following(self) -> int | None:
        """The number of the run that the device follows, if any."""
        return None if self._run is None else self._run.plan.run

    def start(self) -> None:
        """Say what to receive; take up the run that was followed before."""
        topics = self._topics
        for base in (topics.keys(self._membership.name), topics.roster, topics.plan, topics.round):
            self._transport.subscribe(f"{base}/#")
        self._transport.subscribe(topics.ctl(self._membership.name))
        package = self._files.load_run()
        if package is not None:
            try:
                self._take_run(package)
            except (UntrustedError, IntegrityError) as error:
                LOG.warning("the run followed before is not taken up", extra={"kv": {"reason": error}})

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Take one event of the transport."""
        self._now_s = now_s
        match event:
            case Message(topic, payload):
                try:
                    self._on_message(topic, payload)
                except ShoalError as error:
                    reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
                    LOG.warning("refused", extra={"kv": {"topic": topic, "reason": reason, "hint": error.hint}})
            case Connected():
                self._announce_presence()
                self._step(agent.Reconnected())
            case Disconnected(reason):
                LOG.warning("broker connection lost", extra={"kv": {"reason": reason}})

    def _on_message(self, topic: str, payload: bytes) -> None:
        parsed = self._topics.parse(topic)
        if not payload:
            return
        transfer = self._chunks.add(f"{parsed.kind.name}/{parsed.label}", payload, self._now_s)
        if transfer is None:
            return
        if parsed.kind is TopicKind.KEYS:
            self._on_keys(bytes(transfer.payload))
            return
        group = self._membership.group
        purpose, plain = self._membership.open_broadcast(transfer.payload, transfer.signed)
        if self._membership.group is not group:
            LOG.info("new keys in force", extra={"kv": {"roster": self._membership.roster.sequence}})
            self._announce_presence()
            self._look_again(self._topics.round)
        match parsed.kind, purpose:
            case TopicKind.ROSTER, "roster":
                if self._membership.adopt(bytes(plain)):
                    LOG.info("new roster", extra={"kv": {"sequence": self._membership.roster.sequence}})
            case TopicKind.PLAN, "run":
                self._on_run(bytes(plain))
            case TopicKind.MODEL, "model":
                self._on_model(parsed.label, transfer.transfer_id, plain)
            case TopicKind.ROUND, "announcement":
                self._on_announcement(decode(plain, Announcement))
            case TopicKind.CTL, "control":
                self._on_control(decode(plain, Control))
            case _:
                raise UntrustedError(f"a {purpose} where a {parsed.kind.name.lower()} belongs")

    def _on_keys(self, grant: bytes) -> None:
        """Keep newer secrets, and look again at a run that may be made with them: it may have come first."""
        if self._membership.take_grant(grant):
            LOG.info("new keys for later runs", extra={"kv": {"roster": self._membership.roster.sequence}})
            self._look_again(self._topics.roster, self._topics.plan, self._topics.round)

    def _look_again(self, *bases: str) -> None:
        for base in bases:
            self._transport.unsubscribe(f"{base}/#")
            self._transport.subscribe(f"{base}/#")

    def _announce_presence(self) -> None:
        self._transport.publish(*presence(self._membership, self._birth, online=True), retain=True)

    def _on_run(self, package: bytes) -> None:
        if hashlib.sha256(package).digest() == self._package:
            return
        plan = open_plan(package, self._membership)
        if plan.run < self._state.mark.run or (self._run is not None and plan.run <= self._run.plan.run):
            raise UntrustedError(f"run {plan.run} after run {max(self._state.mark.run, plan.run)}")
        self._take_run(package)
        self._files.save_run(package)

    def _take_run(self, package: bytes) -> None:
        run = open_run(package, self._membership)
        digest = run.plan.task_digest
        if self._shares is None or self._shares[0] != digest:
            seed = f"{self._membership.fleet}/{self._membership.name}".encode()
            self._shares = (digest, split(self._load_data(run.bundle.manifest), seed))
        backend = OrtModel(run.bundle, threads=self._threads)
        aggregator = aggregator_of(self._membership.roster)
        self._workshop = Workshop(run.plan, self._membership.identity, aggregator, backend, self._shares[1], run.key)
        self._run, self._package = run, hashlib.sha256(package).digest()
        self._models = Inventory(run, self._membership.group)
        self._base = (self._transport.bytes_sent, self._transport.bytes_received)
        self._figures = {"run": run.plan.run, "algorithm": run.plan.algorithm, "mode": run.plan.mode, "rounds": 0}
        facts = {k: v for k, v in self._figures.items() if k != "rounds"}
        LOG.info("following run", extra={"kv": {**facts, "samples": len(self._shares[1].train)}})
        self._step(agent.Planned(run.plan))
        if self._held is not None:
            held, self._held = self._held, None
            self._on_announcement(held)

    def _on_announcement(self, announcement: Announcement) -> None:
        if self._run is None or announcement.run_id != self._run.plan.run_id:
            self._held = announcement
            return
        self._step(agent.Announced(announcement))

    def _on_model(self, label: str, transfer: bytes, plain: memoryview) -> None:
        if self._models is not None and label in self._labels and self._models.take(label, transfer, plain):
            self._step(agent.ModelArrived(label, transfer))

    def _on_control(self, control: Control) -> None:
        if (control.fleet, control.device) != (self._membership.fleet, self._membership.name):
            raise UntrustedError(f"a control message for {control.device!r}")
        if control.action == Action.REFUSED:
            LOG.warning("upload refused", extra={"kv": {"round": control.round, "reason": control.reason}})
        self._step(agent.Answered(control))
        self._save_status(force=False)

    def on_result(
        self, announcement: Announcement, order: Order, result: Result, models: Mapping[int, Float32Vector]
    ) -> None:
        """Take what the worker made of an order from ``models``; newer ones may have come meanwhile."""
        if isinstance(result, ShoalError):
            LOG.error(
                "round skipped", extra={"kv": {"round": announcement.round, "reason": result, "hint": result.hint}}
            )
            self._step(agent.WorkFailed(announcement.run, announcement.round))
            return
        current = (self._state.mark.run, self._state.mark.round, self._state.mark.nonce)
        if current != (announcement.run, announcement.round, announcement.nonce):
            return
        transfer, sealed = result.parcel.transfer_id, result.parcel.payload
        self._files.save_pending(self._state.mark, transfer, sealed)
        self._sealed = sealed
        self._note_result(announcement, order, result, models)
        self._step(agent.WorkDone(announcement.run, announcement.round, announcement.nonce, transfer))

    def _note_result(
        self, announcement: Announcement, order: Order, result: Finished, models: Mapping[int, Float32Vector]
    ) -> None:
        rounds = self._figures.get("rounds", 0) + 1
        self._figures.update(rounds=rounds, round=announcement.round, cluster=result.model, loss=result.loss)
        if result.tested:
            self._figures["accuracy"] = result.correct / result.tested
        if announcement.finished or order.train:
            theta = models[result.model]
            self._own = OwnModel(announcement.run, announcement.run_id, announcement.round, result.model, theta)
        if announcement.finished:
            self._save_model(durable=True)
            path = kept.keep(self._membership.directory, announcement, order, result.model, models)
            if path:
                self._figures["path"] = path

    def tick(self, now_s: float) -> None:
        """Do what is due: resends, models that do not come, figures."""
        self._now_s = now_s
        if self._timer_s is not None and now_s >= self._timer_s:
            self._timer_s = None
            if (
                self._transport.pending()
            ):  # a slow link is still busy with what it has: sending again would only add to it
                self._carry_out(agent.SetTimer(limits.RESEND_BASE_S))
            else:
                self._step(agent.TimerFired())
        if self._state.stage is agent.Stage.FETCHING and now_s - self._fetching_s > REFETCH_S:
            self._fetching_s = now_s
            self._look_again(*map(self._topics.model, self._labels))
        self._chunks.expire(now_s)
        if self._own is not None and now_s - self._saved_model_s > SAVE_MODEL_EVERY_S:
            self._save_model(durable=False)

    def _step(self, event: agent.Event) -> None:
        self._state, actions = agent.step(self._state, event)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: agent.Do) -> None:
        match action:
            case agent.Follow(labels):
                self._follow(labels)
            case agent.Work(announcement, order):
                self._work(announcement, order)
            case agent.CancelWork():
                self._worker.cancel()
            case agent.Send(_, chunks):
                self._send(chunks)
            case agent.SetTimer(within_s):
                self._timer_s = self._now_s + within_s * (0.5 + 0.5 * self._uniform())
            case agent.ClearTimer():
                self._timer_s = None
            case agent.RunDone(plan):
                self.runs_done += 1
                self._figures["finished"] = True
                self._count_bytes()
                self._ended = {
                    **dict(list(self._ended.items())[1 - RUNS_REMEMBERED :]),
                    str(plan.run): dict(self._figures),
                }
                self._save_status(force=True)
                LOG.info("run finished", extra={"kv": {"run": plan.run, **self._figures}})

    def _follow(self, labels: tuple[str, ...]) -> None:
        for label in set(self._labels) - set(labels):
            self._transport.unsubscribe(f"{self._topics.model(label)}/#")
            if self._models is not None:
                self._models.drop(label)
        for label in labels:
            if label not in self._labels:
                self._transport.subscribe(f"{self._topics.model(label)}/#")
        self._labels = labels
        self._fetching_s = self._now_s

    def _work(self, announcement: Announcement, order: Order) -> None:
        assert self._workshop is not None
        assert self._models is not None
        shop = self._workshop
        try:
            thetas = self._models.thetas(announcement, order)
        except UntrustedError as error:
            LOG.warning("round refused", extra={"kv": {"round": announcement.round, "reason": error}})
            self._step(agent.WorkFailed(announcement.run, announcement.round))
            return
        self._worker.submit(
            lambda cancelled: carry_out(shop, announcement, order, thetas, cancelled),
            lambda result: self._results(lambda: self.on_result(announcement, order, result, thetas)),
        )

    def _send(self, indices: tuple[int, ...] | None) -> None:
        chunks = split_chunks(
            self._sealed,
            kind=ChunkKind.UPLOAD,
            round=self._state.mark.round,
            indices=indices,
            name=self._state.transfer,
        )
        for chunk in chunks:
            self._transport.publish(self._topics.up(self._membership.name), chunk)

    def _save_model(self, *, durable: bool) -> None:
        if self._own is not None:
            self._files.save_model(self._own, durable=durable)
            self._saved_model_s = self._now_s
            self._own = None if durable else self._own

    def _save_status(self, *, force: bool) -> None:
        if not force and self._now_s - self._saved_status_s < STATUS_EVERY_S:
            return
        self._saved_status_s = self._now_s
        self._count_bytes()
        self._files.save_status(
            {
                "device": self._membership.name,
                "fleet": self._membership.fleet,
                "stage": self._state.stage.value,
                "torch_loaded": "torch" in sys.modules,
                **self._figures,
                "ended": self._ended,
            }
        )

    def _count_bytes(self) -> None:
        sent, received = self._transport.bytes_sent - self._base[0], self._transport.bytes_received - self._base[1]
        self._figures.update(bytes_up=sent, bytes_down=received)

    def close(self) -> None:
        """Keep what is worth keeping and say goodbye."""
        self._worker.close()
        self._save_model(durable=True)
        self._transport.publish(*presence(self._membership, self._birth, online=False), retain=True)
        self._transport.close()
