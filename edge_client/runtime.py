"""One device on a transport: carries out the actions of its state machine. It owns no thread and reads no clock.

Drivers call `on_event`, `on_result` and `tick`; the program does so from a queue with the real clock, the loopback
fleet with virtual time and an inline worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from edge_client.followed_run import Run
from edge_client.learning.data import Dataset
from edge_client.learning.model import Backend, OrtModel
from edge_client.learning.training import Cancelled
from edge_client.learning.update import Finished
from edge_client.learning.worker import Result, Worker
from edge_client.membership import DeviceMembership
from edge_client.protocol import round_state as agent
from edge_client.protocol.declining import Decliner
from edge_client.protocol.inbound import Inbound
from edge_client.protocol.model_feed import ModelFeed
from edge_client.protocol.notes import ControlMessages
from edge_client.protocol.patience import RetryTimer
from edge_client.protocol.presence import Attendance
from edge_client.protocol.resync import Resync
from edge_client.protocol.roster_sync import HEARD_LAPSED, RosterSync
from edge_client.protocol.round_state import AgentState
from edge_client.protocol.uplink import Uplink
from edge_client.reporting import Results
from edge_client.run.following import RunFollower
from edge_client.run.held_models import HeldModels
from edge_client.run.jobs import JobFactory
from edge_client.storage.state import DeviceState
from shoal.errors import (
    ConfigError,
    IntegrityError,
    MissingStateError,
    NotEnrolledError,
    ReplacedKeysError,
    ShoalError,
    StorageError,
    UntrustedError,
    reason_of,
)
from shoal.protocol import channels
from shoal.protocol.channels import Channel
from shoal.protocol.codec import decode
from shoal.protocol.documents import RosterChange
from shoal.protocol.messages import Action, Announcement, Assignment, Control
from shoal.protocol.reassembly import Reassembler, TooLargeError, Transfer
from shoal.protocol.topics import ParsedTopic, TopicKind, Topics
from shoal.task.bundle import TaskBundle
from shoal.task.manifest import TaskManifest
from shoal.transport.base import Connected, Disconnected, Message, Transport, TransportEvent
from shoal.types import Float32Vector
from shoal.util.log_throttle import Refusals

LOG = logging.getLogger("shoal.edge")
ANNOUNCED_WITHIN_S: Final = 10.0
"""Time for which a device whose disk fails between two rounds waits for the next announcement, to decline it before it ends."""


class DeviceRuntime:
    """Drives one device.

    Attributes:
        runs_done: number of runs that have finished, without those that were reported as finished before a restart.
    """

    def __init__(
        self,
        membership: DeviceMembership,
        transport: Transport,
        worker: Worker,
        load_data: Callable[[TaskManifest], Dataset],
        *,
        birth: int,
        results: Callable[[Callable[[], None]], None],
        uniform: Callable[[], float],
        threads: int = 1,
        backend: Callable[[TaskBundle, int], Backend] = OrtModel,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Load the device's state.

        Args:
            membership: keys and fleet.
            transport: not started yet.
            worker: runs the jobs.
            load_data: returns the device's samples in a task's shapes.
            birth: the device's incarnation, see `presence`.
            results: runs a callback from the worker on the driver's own thread.
            uniform: draws from [0, 1), for jitter.
            threads: threads for ONNX Runtime.
            backend: makes the backend of a task; the load bench replaces it by a cheap one.
            clock_s: returns unix seconds, for the time at which a run finished.
        """
        self._membership = membership
        self._transport = transport
        self._worker = worker
        self._workplace = JobFactory(membership, load_data, threads=threads, backend=backend)
        self._attendance = Attendance(membership, transport, birth, uniform)
        self._hand_back = results
        self._topics = Topics(membership.fleet)
        self._files = DeviceState(membership.directory)
        self._chunks = Reassembler(whole_transfers=1)
        pending = self._files.pending.load()
        at, answered = pending.mark, pending.answered
        sent = (at.run, at.round, at.nonce) if pending.sealed or answered else None
        self._state = AgentState(membership.index, at, transfer=pending.transfer, sent=sent, answered=answered)
        up = self._topics.up(membership.name)
        notes = ControlMessages(membership, transport, up)
        self._outbox = Uplink(
            files=self._files.pending, transport=transport, notes=notes, topic=up, sealed=pending.sealed, birth=birth
        )
        self._declining = Decliner(membership, notes)
        self._run: Run | None = None
        self._following = RunFollower(membership, self._files)
        self._rosters = RosterSync(membership, transport, self._topics)
        self._held: Announcement | None = None
        self._feed = ModelFeed(transport, self._topics)
        self._inbound = Inbound(membership, self._feed, self._rosters)
        self._lookout = Resync(transport, self._topics.round)
        self._patience = RetryTimer(transport, uniform)
        self._results = Results(membership, self._files, transport, clock_s)
        self._now_s = 0.0
        self._latest: Announcement | None = None
        self._disk_error: tuple[StorageError, float] | None = None
        self._refusals = Refusals(LOG)
        self.runs_done = 0

    @property
    def revoked(self) -> bool:
        """Whether the owner has revoked this device: it ignores all messages and sends none."""
        return self._rosters.revoked

    @property
    def _models(self) -> HeldModels | None:
        """The models of the run that the device follows."""
        return self._following.held

    @property
    def following(self) -> int | None:
        """The number of the run that the device follows, if any."""
        return None if self._run is None else self._run.plan.run

    def start(self) -> None:
        """Subscribe to the fleet's topics, and resume the run that was followed before a restart."""
        self._membership.erase_spent()
        topics = self._topics
        self._rosters.start()
        self._transport.subscribe(topics.filter(TopicKind.KEYS, self._membership.name))
        for kind in (TopicKind.PLAN, TopicKind.ROUND):
            self._transport.subscribe(topics.filter(kind))
        self._transport.subscribe(topics.ctl(self._membership.name))
        if not self._mind_expiry():
            self._resume()

    def _resume(self) -> None:
        run = self._following.resumed()
        if run is not None:
            self._take_run(run)

    def _mind_expiry(self) -> bool:
        """Return whether the roster has expired. Stop the current work when it does, and resume when a newer one arrives."""
        if not self._rosters.look():
            return self._rosters.lapsed
        if self._rosters.lapsed:
            self._worker.cancel()
            if self._state.stage is agent.Stage.WORKING:
                self._step(agent.WorkFailed(self._state.mark.nonce))
            return True
        self._follow_group()
        self._attendance.connected(self._now_s)
        if self._run is None:
            self._resume()
        self._step(agent.Reconnected())
        self._lookout.look(self._topics.plan, self._topics.round)
        return False

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Handle one event of the transport.

        Raises:
            StorageError: the disk is full or fails; the round was declined if it needs this device.
        """
        self._now_s = now_s
        if self.revoked:
            return
        with self._declining_on_disk_errors():
            match event:
                case Message(topic, payload):
                    self._on_chunk(topic, payload)
                case Connected():
                    if not self._mind_expiry():
                        self._step(agent.Reconnected())
                        self._attendance.connected(now_s)
                case Disconnected(reason):
                    LOG.warning("broker connection lost", extra={"kv": {"reason": reason}})

    @contextmanager
    def _declining_on_disk_errors(self) -> Iterator[None]:
        """Decline the round when the disk fails in the body, then let the error end the device.

        If the open round does not wait for this device, the error is held back until the next announcement, so that the
        aggregator learns why the device stops: see `ANNOUNCED_WITHIN_S`.

        Raises:
            StorageError: at once if the open round waits for this device, else with the next announcement, or from `tick`.
        """
        try:
            yield
        except StorageError as error:
            first = self._disk_error is None
            if first:
                LOG.error("the disk fails: stopping", extra={"kv": {"reason": error, "hint": error.hint}})
                self._worker.cancel()
                self._disk_error = error, self._now_s + ANNOUNCED_WITHIN_S
            asked = self._held is not None or self._state.stage in (agent.Stage.FETCHING, agent.Stage.WORKING)
            if self._latest is not None and (asked or not first):
                self._declining.decline(self._latest, error)
                raise

    def _on_chunk(self, topic: str, payload: bytes) -> None:
        try:
            self._on_message(topic, payload)
        except StorageError:
            raise
        except ShoalError as error:
            self._refusals.tell(topic, reason_of(error), error.hint, self._now_s)
        if self.revoked:
            self._worker.cancel()
        elif not self._mind_expiry():
            self._follow_group()

    def _on_message(self, topic: str, payload: bytes) -> None:
        parsed = self._topics.parse(topic)
        if not payload or (self._mind_expiry() and parsed.kind not in HEARD_LAPSED):
            return
        if self._disk_error is not None and parsed.kind is not TopicKind.ROUND:
            return
        transfer = self._collect(parsed, payload)
        if transfer is None:
            return
        channel = channels.channel_at(parsed.kind, transfer.kind)
        if channel is channels.KEYS:
            self._on_keys(bytes(transfer.payload))
            return
        if channel is channels.REVOCATION:
            self._rosters.on_whole(self._membership.open_own_roster(transfer.payload, transfer.signed))
            return
        if channel is channels.CONTROL and self._rosters.lapsed:
            return
        purpose, plain = self._membership.open_broadcast(transfer.payload, transfer.signed)
        # The broadcast key may have changed with this message, which is authentic even if its purpose is wrong.
        self._follow_group()
        if purpose != channel.purpose:
            raise UntrustedError(f"a message of purpose {purpose!r} on the channel {channel.name!r}")
        self._dispatch(channel, parsed.label, transfer.transfer_id, plain)

    def _collect(self, parsed: ParsedTopic, payload: bytes) -> Transfer | None:
        """Store a chunk if its topic and size are expected; return the transfer if this chunk completes it."""
        allowed = self._inbound.allowed(parsed)
        transfer = None
        try:
            if allowed:
                transfer = self._chunks.add(self._inbound.source(parsed), payload, self._now_s, allowed)
        except TooLargeError as error:
            if parsed.kind is not TopicKind.PLAN:
                raise
            LOG.debug("too large until an announcement gives its size", extra={"kv": {"reason": error}})
        self._lookout.heard(self._now_s)
        return transfer

    def _dispatch(self, channel: Channel, label: str, transfer: bytes, plain: memoryview) -> None:
        match channel:
            case channels.ROSTER:
                self._rosters.on_whole(bytes(plain))
            case channels.ROSTER_CHANGE:
                self._rosters.on_change(decode(plain, RosterChange), self._now_s)
            case channels.RUN:
                self._on_run(bytes(plain))
            case channels.MEAN | channels.CHECKPOINT:
                self._on_model(label, transfer, plain)
            case channels.ANNOUNCEMENT:
                self._on_announcement(decode(plain, Announcement))
            case channels.CONTROL:
                self._on_control(decode(plain, Control))

    def _follow_group(self) -> None:
        """If the broadcast key has changed, announce presence under the new key and re-fetch the retained announcement."""
        if not self._attendance.stale or self._rosters.lapsed:
            return
        LOG.info("new broadcast key", extra={"kv": {"roster": self._membership.roster.sequence}})
        self._attendance.announce()
        self._lookout.look(self._topics.round)

    def _on_keys(self, grant: bytes) -> None:
        """Store newer secrets, publish the receiving keys for the next ones, and re-request messages that came too early."""
        if self._membership.take_grant(grant):
            self._attendance.offer_keys()
            LOG.info("newer keys", extra={"kv": {"roster": self._membership.newest_generation}})
            self._rosters.look_again()
            self._lookout.look(self._topics.plan, self._topics.round)

    def _on_run(self, package: bytes) -> None:
        with self._declining.unless_followed(self._following, self._announce_held):
            run = self._following.begun(package, self._run, self._state.mark.run)
            if run is not None:
                self._take_run(run)
        if run is not None:
            self._keep_run(package)
        elif self._following.late is not None:
            self._inbound.begin_late(self._following.late.plan)
            self._announce_held()

    def _keep_run(self, package: bytes) -> None:
        """Store a run, only once it is in force: if the samples do not fit the task, the earlier run stays."""
        self._following.keep(package)
        self._announce_held()

    def _take_run(self, run: Run) -> None:
        """Put a run in force."""
        samples = self._workplace.follow(run)
        self._run = run
        self._inbound.begin(run)
        self._declining.followed()
        self._results.begin(run)
        facts = {"run": run.plan.run, "algorithm": run.plan.algorithm, "mode": run.plan.mode}
        LOG.info("following run", extra={"kv": {**facts, "samples": samples}})
        lost = self._state.sent is not None and self._results.lacks_final_model(self._state.mark, run.plan)
        self._step(agent.Planned(run.plan, lost))

    def _announce_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._on_announcement(held)

    def _on_announcement(self, announcement: Announcement) -> None:
        self._latest = announcement
        if self._disk_error is not None:
            raise self._disk_error[0]
        run = self._run
        if run is not None and announcement.run < run.plan.run:
            return
        larger = self._inbound.announced(announcement)
        if run is None or announcement.run_id != run.plan.run_id:
            # The announcement overtook its run package: handle it when that has arrived.
            self._held = announcement
            self._fetch_late(announcement)
            if not self._lookout.found(announcement.nonce, self._missing()):
                self._declining.unfollowed(announcement)
                if larger and self._topics.plan in self._missing():
                    self._lookout.look(self._topics.plan)
            return
        held = announcement.held
        begun = announcement.nonce == self._state.mark.nonce  # before the newer keys came: it is finished under its own
        due = not (begun or announcement.finished)
        if due and self._membership.keys_since > held.key_version:
            LOG.info("round declined: the owner has replaced its keys", extra={"kv": {"round": announcement.round}})
            self._declining.decline(announcement, ReplacedKeysError(f"under keys of roster {held.key_version}"))
            return
        try:
            self._step(agent.Announced(announcement))
        except UntrustedError as error:
            self._declining.refused(announcement, error, self._state.mark)
            raise
        self._held = None
        if not self._lookout.found(announcement.nonce, self._missing()):
            self._declining.again(announcement)

    def _fetch_late(self, announcement: Announcement) -> None:
        """Fetch the checkpoint with which this device begins the announced run, if it needs one."""
        late = self._following.late
        if late is not None and late.plan.run_id == announcement.run_id:
            transfers = late.locate(announcement)
            self._feed.follow(tuple(sorted(transfers)), None)
            if not transfers:
                self._declining.decline(announcement, MissingStateError("no checkpoint is sealed under our keys yet"))

    def _missing(self) -> tuple[str, ...]:
        """Return the base topics of the messages that the device waits for."""
        if self._held is None:
            return self._feed.bases if self._state.stage is agent.Stage.FETCHING else ()
        return (self._topics.plan,) if self._following.late is None else self._feed.bases

    def _on_model(self, label: str, transfer: bytes, plain: memoryview) -> None:
        """Handle a mean or a checkpoint."""
        if label not in self._feed.labels:
            return
        if self._following.late is not None:
            self._begin_late(label, transfer, plain)
        elif self._models is not None and self._took(self._models, label, transfer, plain):
            self._step(agent.ModelArrived(label, transfer))

    def _took(self, models: HeldModels, label: str, transfer: bytes, plain: memoryview) -> bool:
        """Return whether a received mean or checkpoint is one that the device waits for."""
        try:
            return models.take(label, transfer, plain)
        except (IntegrityError, UntrustedError) as error:
            announcement = self._state.announcement
            if announcement is not None and self._state.stage is agent.Stage.FETCHING:
                self._skip(announcement, error)
            raise

    def _begin_late(self, label: str, transfer: bytes, sealed: memoryview) -> None:
        """Begin a run with a checkpoint, on a device that could not open the run package."""
        late = self._following.late
        assert late is not None
        with self._declining.unless_followed(self._following, self._announce_held):
            run = self._following.taken(label, transfer, sealed, self._inbound.most_task_bytes)
            if run is not None:
                self._take_run(run)
        if run is not None:
            self._keep_run(late.package)

    def _on_control(self, control: Control) -> None:
        if (control.fleet, control.device) != (self._membership.fleet, self._membership.name):
            raise UntrustedError(f"a control message for {control.device!r}")
        if control.action == Action.REFUSED:
            LOG.warning("upload refused", extra={"kv": {"round": control.round, "reason": control.reason}})
        self._step(agent.Answered(control))
        self._results.publish(self._state.stage, self._now_s)

    def on_result(
        self, announcement: Announcement, assignment: Assignment, result: Result, models: Mapping[int, Float32Vector]
    ) -> None:
        """Handle the result of a job on ``models``; ignore it if the job was given up in the meantime, for a newer round say."""
        if self.revoked or self._rosters.lapsed or self._disk_error is not None:
            return
        current = (self._state.mark.run, self._state.mark.round, self._state.mark.nonce)
        if self._state.done or current != (announcement.run, announcement.round, announcement.nonce):
            return
        with self._declining_on_disk_errors():
            self._on_current_result(announcement, assignment, result, models)

    def _on_current_result(
        self, announcement: Announcement, assignment: Assignment, result: Result, models: Mapping[int, Float32Vector]
    ) -> None:
        if isinstance(result, StorageError):
            raise result
        if isinstance(result, ShoalError):
            self._skip(announcement, result)
            return
        transfer, sealed = result.parcel.transfer_id, result.parcel.payload
        # Before the upload: once a final round's upload is answered, the models are not sent again.
        self._results.note(announcement, assignment, result, models, self._now_s)
        self._outbox.keep(self._state.mark, transfer, sealed)
        self._step(agent.WorkDone(announcement.run, announcement.round, announcement.nonce, transfer))
        self._derive_ahead(announcement)

    def _derive_ahead(self, announcement: Announcement) -> None:
        """Derive the mask of the next round while the device waits for the others."""
        derive = None if self._models is None else self._models.next_mask(announcement)
        if derive is None:
            return

        def job(_cancelled: Callable[[], bool]) -> Finished:
            derive()
            raise Cancelled("there is no result to hand back")

        self._worker.submit(job, lambda _result: None)

    def _skip(self, announcement: Announcement, error: ShoalError) -> None:
        facts = {"round": announcement.round, "reason": error, "hint": error.hint}
        LOG.error("round skipped", extra={"kv": facts})
        self._declining.decline(announcement, error)
        self._step(agent.WorkFailed(announcement.nonce))

    def tick(self, now_s: float) -> None:
        """Do the work that is due: reminders, requests for lost messages, saving of the model.

        Raises:
            StorageError: as `on_event`.
        """
        self._now_s = now_s
        if self._disk_error is not None:
            if now_s >= self._disk_error[1]:
                raise self._disk_error[0]
            return
        with self._declining_on_disk_errors():
            self._tick(now_s)

    def _tick(self, now_s: float) -> None:
        self._rosters.tick(now_s)
        self._chunks.expire(now_s)
        if self.revoked or self._mind_expiry():
            return
        if self._patience.ran_out(now_s):
            self._step(agent.TimerFired())
        if self._attendance.tick(now_s):
            self._lookout.ask()
        self._lookout.tick(now_s, self._missing())
        self._results.keep_up(now_s)

    def _step(self, event: agent.Event) -> None:
        self._state, actions = agent.step(self._state, event)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: agent.Do) -> None:
        match action:
            case agent.Follow(labels):
                for label in set(self._feed.labels) - set(labels):
                    self._chunks.drop(self._inbound.source_of(TopicKind.MODEL, label))
                self._feed.follow(labels, self._models)
            case agent.Locate(announcement, assignment):
                self._locate(announcement, assignment)
            case agent.Work(announcement, assignment):
                self._work(announcement, assignment)
            case agent.CancelWork():
                self._worker.cancel()
            case agent.Send(transfer, asked):
                self._outbox.send(self._state.mark, transfer, asked, len(self._membership.roster.active()))
            case agent.Remind(transfer, run_id, reconnected):
                self._outbox.remind(self._state.mark, transfer, run_id, reconnected=reconnected)
            case agent.SetTimer(within_s):
                self._patience.set(within_s, self._now_s)
            case agent.ClearTimer():
                self._patience.clear()
            case agent.RunDone(plan):
                self.runs_done += self._results.finish(plan, self._state.stage, self._now_s)
                self._outbox.forget(self._state.mark, self._state.transfer)

    def _locate(self, announcement: Announcement, assignment: Assignment) -> None:
        assert self._models is not None
        try:
            transfers = self._models.locate(announcement, assignment)
            arrived = self._models.arrived()
        except (IntegrityError, NotEnrolledError, UntrustedError) as error:
            self._skip(announcement, error)
            return
        ahead = self._models.labels_ahead(announcement, assignment)
        self._step(agent.Located(announcement.nonce, transfers, arrived, ahead))

    def _work(self, announcement: Announcement, assignment: Assignment) -> None:
        assert self._models is not None
        try:
            thetas = self._models.thetas(announcement, assignment)
            job = self._workplace.job(announcement, assignment, thetas, self._models)
        except (IntegrityError, UntrustedError) as error:
            self._skip(announcement, error)
            return
        self._worker.submit(
            job, lambda result: self._hand_back(lambda: self.on_result(announcement, assignment, result, thetas))
        )
        # While the job trains. Its result is handed back to this thread, so no upload leaves before this returns.
        try:
            self._models.store(announcement)
        except StorageError:
            raise  # `_declining_on_disk_errors` cancels the job
        except ConfigError as error:
            self._worker.cancel()
            self._skip(announcement, error)

    def remember_end(self) -> None:
        """Record that the run's end was reported, if it has ended, so that it is not counted again after a restart."""
        self._results.remember_end()

    def close(self) -> None:
        """Stop the worker, save the newest model, publish the presence as offline, and close the transport.

        Raises:
            ConfigError: the newest model can't be written.
        """
        self._worker.close()
        try:
            self._results.save_model(self._now_s, durable=True)
        finally:
            self._attendance.leave()
            self._transport.close()
