"""One device on a transport: opens what arrives, lets its session decide, and carries the session's actions out.

It owns no thread and reads no clock. Drivers call `on_event`, `on_result` and `tick`; the program does so from a queue with
the real clock, the loopback fleet with virtual time and an inline worker. All decisions are those of
`edge_client.protocol.session`; the outcome of an action is an event for it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from crypto.seal.identity import SIGNATURE_BYTES
from edge_client.config import EdgeConfig, ditto_weight, parse_hours
from edge_client.learning.data import Dataset, load, watch_of
from edge_client.learning.executor.choice import choose
from edge_client.learning.feedback import residual_for
from edge_client.learning.model import Backend
from edge_client.learning.trainer.model import make_model
from edge_client.models.checkpoints import BadCheckpointError
from edge_client.protocol import inbound
from edge_client.protocol import round_state as rounds
from edge_client.protocol import session_io as io
from edge_client.protocol.declining import Declines, decline_reason
from edge_client.protocol.presence import HEAD_EVERY, Attendance, presence, receiving_notice
from edge_client.protocol.session import DeviceSession, Do, Steps
from edge_client.reporting import Results
from edge_client.run.beginning import NotMeantError, RunFollower
from edge_client.run.finishing import Finisher
from edge_client.run.jobs import JobFactory
from edge_client.run.policy import check_turn
from edge_client.storage.state import DeviceState, Rest
from edge_client.uplink import ControlMessages, Uplink
from edge_client.vitals import EVERY_S, measure
from shoal.errors import (
    ConfigError,
    DataError,
    IntegrityError,
    MeteredError,
    NoSumError,
    NotEnrolledError,
    ShoalError,
    StorageError,
    TrainerError,
    UntrustedError,
    WireError,
    reason_of,
)
from shoal.membership.roster import RosterForkError, apply_change, expiry_of
from shoal.protocol import channels
from shoal.protocol.messages import Action, Announcement, Assignment, Control, ModelsHeld
from shoal.protocol.reassembly import Reassembler, TooLargeError, Transfer
from shoal.protocol.shards import PART_LABEL
from shoal.protocol.topics import ParsedTopic, TopicKind, Topics
from shoal.task.bundle import TaskBundle
from shoal.task.manifest import TaskManifest
from shoal.transport.base import Connected, Disconnected, Message, Transport, TransportEvent, Unreached
from shoal.types import Float32Vector
from shoal.util.log_throttle import Refusals

if TYPE_CHECKING:
    from edge_client.learning.worker import Result, Worker
    from edge_client.membership import DeviceMembership
    from edge_client.models.round_context import Run
    from edge_client.run.held_models import HeldModels
    from shoal.protocol.documents import Roster, RosterChange, RunPlan

LOG = logging.getLogger("shoal.edge")
GROWTH_EVERY_S = 60.0
"""Interval at which a device looks whether its data have grown enough for a standing order."""
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class DeviceRuntime:
    """Drives one device.

    Attributes:
        session: the device's session; all that the device decides by is in it.
        runs_done: number of runs that have finished, without those that were reported as finished before a restart.
    """

    def __init__(
        self,
        config: EdgeConfig,
        membership: DeviceMembership,
        transport: Transport,
        worker: Worker,
        *,
        birth: int,
        results: Callable[[Callable[[], None]], None],
        uniform: Callable[[], float],
        samples: Callable[[TaskManifest], Dataset] | None = None,
        backend: Callable[[TaskBundle, int], Backend] | None = None,
        clock_s: Callable[[], float] = time.time,
        finish_worker: Worker | None = None,
        broker: str = "",
    ) -> None:
        """Load the device's state.

        Args:
            config: the device's settings.
            membership: keys and fleet.
            transport: not started yet.
            worker: runs the jobs.
            birth: the device's incarnation, see `presence`.
            results: runs a callback from the worker on the driver's own thread.
            uniform: draws from [0, 1), for jitter.
            samples: returns the device's samples in a task's shapes; None reads the files of ``config``.
            backend: makes the backend of a task; None takes the executor of ``config``.
            clock_s: returns unix seconds, for the time at which a run finished.
            finish_worker: runs the personal finish of ended runs, and nothing else; None turns it off.
            broker: address of the broker, without user and password, for the status file.
        """
        executor = choose(config.executor)
        backend = backend or make_model(executor, config.own_trainer)
        self._config, self._presence_due_s = config, math.inf
        self._told: tuple[bool, tuple[str, ...]] = False, ()
        self._bad_sealers = set[str]()
        self._broker = broker
        self._clock_s = clock_s
        self._membership = membership
        self._transport = transport
        self._worker = worker
        self._birth = birth
        self._uniform = uniform
        self._hand_back = results
        self._files = DeviceState(membership.directory)
        self._growth_due_s, self._told_growth = 0.0, False
        self._rest = Rest(membership.directory)
        pending = self._files.pending.load()
        self._jobs = JobFactory(
            membership,
            samples or (lambda manifest: load(config.data, manifest, config.reading)),
            threads=config.threads,
            backend=backend,
            watch=watch_of(config.data) if config.watch else None,
            private=pending.private,
        )
        self._topics = Topics(membership.fleet)
        self._chunks = Reassembler(whole_transfers=1)
        up = self._topics.up(membership.name)
        self._notes = ControlMessages(membership, transport, up)
        self._uplink = Uplink(
            files=self._files.pending,
            transport=transport,
            notes=self._notes,
            topic=up,
            part_topic=lambda worker: self._topics.part(membership.name, worker),
            sealed=pending.sealed,
            residual=pending.residual,
        )
        at, answered = pending.mark, pending.answered
        sent = (at.run, at.round, at.nonce) if pending.sealed or answered else None
        self.session = DeviceSession(
            name=membership.name,
            fleet=membership.fleet,
            round=rounds.RoundState(membership.index, at, transfer=pending.transfer, sent=sent, answered=answered),
            declines=Declines(membership.index),
            presence=Attendance(membership.group),
            turn=birth,
        )
        self._following = RunFollower(membership, self._files)
        self._run: Run | None = None
        self._results = Results(membership, self._files, transport, clock_s, executor=executor)
        self._finisher = Finisher(
            membership,
            finish_worker,
            self._jobs,
            backend=backend,
            hand_back=results,
            clock_s=clock_s,
            weight=ditto_weight(config.personal),
        )
        self._refusals = Refusals(LOG)
        self._disk_error: StorageError | None = None
        self._roster: tuple[Roster, io.RosterFacts] | None = None
        self._now_s = 0.0
        self.runs_done = 0

    @property
    def revoked(self) -> bool:
        """Whether the owner has revoked this device: it ignores all messages and sends none."""
        return self.session.roster.revoked

    @property
    def following(self) -> int | None:
        """The number of the run that the device follows, if any."""
        return None if self._run is None else self._run.plan.run

    @property
    def state_line(self) -> str:
        """What the device does now, as one line for people."""
        return self._results.state_line(self.session)

    @property
    def finishing(self) -> bool:
        """Whether the personal finish of a run that has ended is under way, or about to begin."""
        return self._finisher.is_pending(idle=self.session.idle)

    @property
    def _models(self) -> HeldModels | None:
        return self._following.held

    # ------------------------------------------------------------------------------------------------------- drivers

    def start(self) -> None:
        """Subscribe to the fleet's topics, and resume the run that was followed before a restart."""
        self._membership.erase_spent()
        self._go_on(self.session.started(self._facts()))

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Handle one event of the transport.

        Raises:
            StorageError: the disk is full or fails; the round was declined if it needs this device.
        """
        self._now_s = now_s
        if self.revoked:
            return
        with self._stopping_on_disk_errors():
            match event:
                case Message(topic, payload):
                    self._on_chunk(topic, payload)
                case Connected(_, expires_at_s):
                    self._results.connected(self._broker, expires_at_s)
                    self._go_on(self.session.checked(self._facts()))
                    if not self.session.roster.lapsed:
                        self._tell(io.Connected())
                case Unreached(reason):
                    self._results.disconnected(self._broker, reason)
                case Disconnected(reason):
                    self._results.disconnected(self._broker, reason)
                    LOG.warning("broker connection lost", extra={"kv": {"reason": reason}})

    def on_result(
        self, announcement: Announcement, assignment: Assignment, result: Result, models: Mapping[int, Float32Vector]
    ) -> None:
        """Handle the result of a job; ignore it if the job was given up in the meantime, for a newer round say.

        ``models`` are the job's, (d,) float32 by id.

        Raises:
            StorageError: as `on_event`.
        """
        if not self.session.works_on(announcement):
            return
        with self._stopping_on_disk_errors():
            if isinstance(result, StorageError):
                raise result
            if isinstance(result, ShoalError):
                self._skip(announcement, result)
                return
            # Before the upload: once a final round's upload is answered, the models are not sent again.
            models = self._jobs.keep_private(announcement, result, models)
            self._results.note(announcement, assignment, result, models, self._now_s)
            if self._results.leave_out(self._jobs.left_out):
                self._publish_presence(online=True)
            self._uplink.keep(self.session.round.mark, result.pieces, result.residual, self._jobs.private)
            transfer = result.pieces[0].transfer_id
            done = rounds.WorkDone(announcement.run, announcement.round, announcement.nonce, transfer)
            self._go_on(self.session.happened(done, self._facts()))
            if self._models is not None:
                self._models.trained(result.norm)
                derive = self._models.next_mask(announcement)
                if derive is not None:  # while the device waits for the others
                    self._worker.submit(derive, lambda _result: None)
            if announcement.finished and self._run is not None:
                self._finisher.follow(self._run)

    def tick(self, now_s: float) -> None:
        """Do the work that is due: reminders, requests for lost messages, saving of the model.

        Raises:
            StorageError: as `on_event`.
        """
        self._now_s = now_s
        with self._stopping_on_disk_errors():
            self._chunks.expire(now_s)
            self._rest.keep_up(now_s)
            self._go_on(self.session.tick(self._facts()))
            if not self.session.stopped:
                self._results.keep_up(now_s)
                if (now_s >= self._presence_due_s or self._tells_growth(now_s)) and self._results.is_connected:
                    self._publish_presence(online=True)
            if self._disk_error is None:
                self._results.keep_status(self.session, now_s)
        self._finisher.keep_up(idle=self.session.idle)

    def _tells_growth(self, now_s: float) -> bool:
        """Look now and then whether the data have grown enough for a standing order, and the aggregator does not know."""
        if now_s < self._growth_due_s:
            return False
        self._growth_due_s = now_s + GROWTH_EVERY_S
        held = self._held
        return held is not None and held.grown and not self._told_growth

    def remember_end(self) -> None:
        """Record that the run's end was reported, if it has ended, so that it is not counted again after a restart."""
        self._results.remember_end()

    def close(self) -> None:
        """Stop the worker, save the newest model, publish the presence as offline, and close the transport.

        Raises:
            ConfigError: the newest model can't be written.
        """
        self._finisher.close()
        self._worker.close()
        try:
            self._results.save_model(self._now_s, durable=True)
            self._rest.keep_up(self._now_s, closing=True)
        finally:
            try:
                self._publish_presence(online=False)
            except WireError as error:  # another client has taken our name over, or the send queue is full
                LOG.debug("presence not published", extra={"kv": {"reason": error}})
            self._transport.close()

    @contextmanager
    def _stopping_on_disk_errors(self) -> Iterator[None]:
        """Let the session decline the round when the disk fails in the body.

        Raises:
            StorageError: once the session stops the program.
        """
        try:
            yield
        except StorageError as error:
            if error is self._disk_error:
                raise
            if self._disk_error is None:
                LOG.error("the disk fails: stopping", extra={"kv": {"reason": error, "hint": error.hint}})
                self._disk_error = error
            self._tell(io.DiskFailed())

    # ------------------------------------------------------------------------------------------------------ messages

    def _on_chunk(self, topic: str, payload: bytes) -> None:
        whole = True
        try:
            whole = self._on_message(topic, payload)
        except StorageError:
            raise
        except ShoalError as error:
            self._refusals.tell(topic, error, self._now_s)
        if whole and not self.revoked:
            self._go_on(self.session.settled(self._facts()))

    def _on_message(self, topic: str, payload: bytes) -> bool:
        """Handle a chunk; return whether it may have changed more than the transfer that it belongs to."""
        parsed = self._topics.parse(topic)
        self._go_on(self.session.checked(self._facts()))
        if not payload or not self.session.hears(parsed.kind):
            return True
        transfer = self._collect(parsed, payload)
        if transfer is None:
            return False
        channel = channels.channel_at(parsed.kind, transfer.kind)
        content = self._content(channel, parsed.label, transfer)
        del transfer  # frees the sealed bytes before the content is used
        if channel is channels.PART_CONTROL:
            self._resend_part(content)
            return True
        self._go_on(self.session.receive(channel, content, self._facts()))
        return True

    def _collect(self, parsed: ParsedTopic, payload: bytes) -> Transfer | None:
        """Store a chunk if its topic and size are expected; return the transfer if this chunk completes it."""
        allowed = inbound.allowed(parsed, self.session, len(self._membership.roster.devices))
        transfer = None
        try:
            if allowed:
                source = inbound.source(parsed.kind, parsed.label)
                transfer = self._chunks.add(source, payload, self._now_s, allowed)
        except TooLargeError as error:
            if parsed.kind is not TopicKind.PLAN:
                raise
            LOG.debug("too large until an announcement gives its size", extra={"kv": {"reason": error}})
        self.session = self.session.arrived(self._now_s)
        return transfer

    def _content(self, channel: channels.Channel, label: str, transfer: Transfer) -> Any:
        """Return the content of a transfer as `DeviceSession.receive` takes it.

        Raises:
            UntrustedError, SealError, WireError: it is not from the sender that the channel names, or malformed.
        """
        if channel is channels.KEYS:
            return bytes(transfer.payload)
        if channel is channels.REVOCATION:
            return self._membership.open_own_roster(transfer.payload, transfer.signed)
        group = self._membership.group
        if channel in (channels.PART_CONTROL, channels.MEAN_PART):
            workers = () if self._run is None else self._run.plan.workers
            purpose, plain = self._membership.open_from_worker(workers, transfer.payload, transfer.signed)
        else:
            purpose, plain = self._membership.open_broadcast(transfer.payload, transfer.signed)
        if self._membership.group is not group:
            # The broadcast key has changed with this message, which is authentic even if its purpose is wrong.
            self._go_on(self.session.group_followed(self._facts()))
        if purpose != channel.purpose:
            raise UntrustedError(f"a message of purpose {purpose!r} on the channel {channel.name!r}")
        return inbound.content(channel, label, transfer.transfer_id, plain)

    def _resend_part(self, control: Control) -> None:
        """Send those chunks of a part again that its worker asks for, unless the part may still be on its way."""
        member, state = self._membership, self.session.round
        if (control.fleet, control.device, control.action) != (member.fleet, member.name, Action.NACK):
            raise UntrustedError(f"a control message for {control.device!r}")
        if state.stage is rounds.Stage.SENDING and not (self.session.in_flight and self._uplink.busy):
            self._uplink.send_part(state.mark, control.transfer, control.missing)

    # ------------------------------------------------------------------------------------------------------- session

    def _facts(self) -> io.Facts:
        member = self._membership
        roster, expired = member.roster, member.expired
        if self._roster is None or self._roster[0] is not roster or self._roster[1].expired != expired:
            facts = io.RosterFacts(
                roster.sequence,
                member.roster_bytes[:SIGNATURE_BYTES],
                roster.active_count,
                until=expiry_of(roster),
                expired=expired,
                listed=member.listed,
            )
            self._roster = roster, facts
        return io.Facts(
            now_s=self._now_s,
            roster=self._roster[1],
            group=member.group,
            key_version=member.newest_generation,
            keys_since=member.keys_since,
            busy=self._uplink.busy,
            jitter=self._uniform(),
        )

    def _tell(self, event: io.Event | rounds.Event) -> None:
        self._go_on(self.session.happened(event, self._facts()))

    def _go_on(self, steps: Steps) -> None:
        self.session, actions = steps
        if self.session.round.stage is not rounds.Stage.SENDING:
            self._uplink.release()
        self._finisher.give_way(idle=self.session.idle)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Do) -> None:  # noqa: PLR0912, PLR0915 - a case for each action
        transport, member, mark = self._transport, self._membership, self.session.round.mark
        match action:
            case io.Subscribe(kind, label) | io.Resubscribe(kind, label):
                transport.subscribe(self._filter(kind, label))
            case io.Unsubscribe(kind, label):
                self._chunks.drop(inbound.source(kind, label))
                self._chunks.drop(inbound.source(TopicKind.MEAN_PART, label))
                transport.unsubscribe(self._filter(kind, label))
            case io.PublishPresence():
                self._publish_presence(online=True)
            case io.OfferReceivingKeys():
                transport.publish(*receiving_notice(member), retain=True)
            case io.SendDecline(announcement, reason, model):
                self._notes.decline(announcement, reason, model)
            case rounds.Send(chunks):
                self._uplink.send(mark, chunks, member.roster.active_count)
            case io.SendReminder(run_id, turn):
                self._uplink.remind(mark, run_id, turn)
            case io.AdoptRoster(signed):
                self._adopt(signed)
            case io.ApplyRosterChange(change):
                self._apply(change)
            case io.TakeGrant(sealed):
                if member.take_grant(sealed):
                    self._tell(io.KeysTaken())
            case io.ResumeRun():
                self._resume_run()
            case io.OpenRun(package):
                self._open_run(package)
            case io.LocateCheckpoint(announcement):
                late = self._following.late
                labels = () if late is None else tuple(late.locate(announcement))
                self._tell(io.CheckpointLocated(announcement, labels))
            case io.BeginWithCheckpoint(transfer):
                self._begin_late(transfer)
            case rounds.Locate(announcement, assignment):
                self._locate(announcement, assignment)
            case rounds.Work(announcement, assignment):
                self._work(announcement, assignment)
            case rounds.CancelWork():
                self._worker.cancel()
            case rounds.RunDone(plan):
                self._run_done(plan)
            case io.TakeModel(transfer):
                self._take_model(transfer)
            case io.DropModel(label):
                if self._models is not None:
                    self._models.drop(label)
            case io.TakeNotice(sent_at_s, choice):
                self._results.compare_clock(sent_at_s)
                if choice and self._results.choose(choice):
                    self._publish_presence(online=True)
            case io.Log(level, text, facts):
                LOG.log(LEVELS[level], text, extra={"kv": dict(facts)})
            case io.PublishStatus():
                self._results.publish(self.session, self._now_s)
            case io.Refuse(error):
                raise error
            case io.Stop():
                assert self._disk_error is not None
                raise self._disk_error
            case _:
                raise AssertionError(action)

    def _publish_presence(self, *, online: bool) -> None:
        models, contrary = self._models, self._contrary
        head = None if models is None else models.head
        self._told = models is not None and models.left, contrary
        # Repeated, since an earlier life's will may have replaced it at the broker.
        self._presence_due_s = self._now_s + EVERY_S
        vitals = measure(self._config.dir) if online and self._config.vitals else None
        answers, held = self._results.answers if online else None, self._held if online else None
        self._told_growth = held is not None and held.grown
        told = presence(
            self._membership,
            self._birth,
            online=online,
            head=head,
            answers=0 if answers is None else answers.run,
            doubted=self._jobs.doubts_model(answers),
            vitals=vitals,
            left_out=self._jobs.left_out.count if online else 0,
            contrary=contrary,
            held=held,
        )
        self._transport.publish(*told, retain=True)

    @property
    def _held(self) -> ModelsHeld | None:
        """The models of a standing order's run that the device holds, and whether its data have grown."""
        models = self._models
        if models is None or models.plan.schedule is None:
            return None
        told, growth = models.to_follow()[0], models.plan.schedule.growth
        return told and dataclasses.replace(told, grown=growth > 0 and self._jobs.has_grown(growth))

    def _run_done(self, plan: RunPlan) -> None:
        new = self._results.finish(plan, self.session, self._now_s)
        self.runs_done += new
        if new:
            self._rest.begin(self._now_s)
        self._publish_presence(online=True)  # the model that answers has changed
        self._uplink.forget(self.session.round.mark, self.session.round.transfer, self._jobs.private)

    def _filter(self, kind: TopicKind, label: str) -> str:
        if kind is TopicKind.MODEL and label.startswith(PART_LABEL):
            kind = TopicKind.MEAN_PART
        if kind is TopicKind.CTL:
            return self._topics.ctl(self._membership.name)
        return self._topics.filter(kind, self._membership.name if kind is TopicKind.KEYS else label)

    # -------------------------------------------------------------------------------------------------------- roster

    def _adopt(self, signed: bytes, change: RosterChange | None = None) -> None:
        member = self._membership
        before = member.roster.aggregator
        try:
            if member.adopt(signed):
                LOG.info("new roster", extra={"kv": {"sequence": member.roster.sequence}})
        except RosterForkError as error:
            if member.is_new_fork(signed):
                LOG.error("two rosters of one sequence", extra={"kv": {"reason": error, "hint": error.hint}})
            raise
        finally:  # also after a refusal: `adopt` may have read a newer roster that was copied here by hand
            replaced = member.roster.aggregator != before
            if replaced:  # the run ends here
                self._results.save_model(self._now_s, durable=True)
            self._tell(io.RosterTaken(change, replaced=replaced))

    def _apply(self, change: RosterChange) -> None:
        signed = None
        try:
            signed = apply_change(self._membership.roster, change)
            self._adopt(signed, change)
        except ShoalError as error:
            facts = {"sequence": change.sequence, "reason": reason_of(error)}
            LOG.warning("change of the roster refused", extra={"kv": facts})
        if signed is None:
            self._tell(io.RosterTaken(change))

    # ----------------------------------------------------------------------------------------------------------- run

    def _open_run(self, package: memoryview) -> None:
        check = partial(check_turn, rested_s=self._rest.seconds(self._now_s), now_s=int(self._clock_s()))
        least = self.session.round.mark.run
        taken = self._takes(package, lambda: self._following.begun(package, self._run, least, check))
        if not taken and self._following.late is not None:
            self._tell(io.RunNeedsCheckpoint(self._following.late.plan))

    def _begin_late(self, model: io.ModelTransfer) -> None:
        """Begin a run with a checkpoint, on a device that could not open the run package."""
        late, most = self._following.late, self.session.sizes.most_package
        assert late is not None
        self._takes(late.package, lambda: self._following.taken(model.label, model.transfer, model.plain, most))

    def _takes(self, package: bytes | memoryview, opened: Callable[[], Run | None]) -> bool:
        """Put the run in force that ``opened`` returns, and store it; return whether there is one that this device can do.

        It is stored only once it is in force: if the samples do not fit the task, the earlier run stays.

        Raises:
            ShoalError: the run can't be opened; the session is told.
        """
        run = None
        try:
            run = opened()
            if run is not None:
                self._take_run(run)
        except NotMeantError as error:
            LOG.info("not for this device", extra={"kv": {"reason": error}})
            self._tell(io.RunForOthers(self._following.newest))
            return False
        except ShoalError as error:
            self._suspect(error)
            late = self._following.late
            plan = None if late is None else late.plan
            self._tell(io.RunRefused(self._following.newest, decline_reason(error), plan))
            if run is None or isinstance(error, StorageError):
                raise
            self._following.refuse(package, run)
            if self._results.refuse(run.plan.run, error, self.session, self._now_s):
                facts = {"reason": error, "hint": error.hint}
                LOG.error("this device can't do run %d: %s", run.plan.run, reason_of(error), extra={"kv": facts})
            return False
        if run is None:
            return False
        self._following.keep(package)
        if run.plan.schedule is not None:
            self._publish_presence(online=True)  # which models the device begins with
        self._tell(io.RunStored())
        return True

    def _take_run(self, run: Run) -> None:
        """Put a run in force."""
        samples = self._jobs.follow(run)
        self._run = run
        self._uplink.workers = run.plan.workers
        if run.plan.workers:
            self._transport.subscribe(self._topics.at(TopicKind.PART_CTL, self._membership.name))
        self._results.begin(run)
        self._results.warn(self._jobs.doubts)
        if self._results.leave_out(self._jobs.left_out) and self._results.is_connected:
            self._publish_presence(online=True)  # the owner learns how many
        self._finisher.follow(run)
        facts = {
            "run": run.plan.run,
            "algorithm": run.plan.recipe.algorithm,
            "mode": run.plan.recipe.mode,
            "samples": samples,
        }
        if private := run.bundle.manifest.private_length:
            facts["private_coordinates"] = private
        LOG.info("following run", extra={"kv": facts})
        state = self.session.round
        lost = state.sent is not None and self._results.lacks_final_model(state.mark, run.plan)
        self._tell(io.RunFollowed(run.plan, len(run.bundle.to_bytes()), lost))

    def _resume_run(self) -> None:
        """Follow the run from before a restart; a device that can't do its task any more waits for a later run."""
        run = self._following.resumed(self.session.round.mark)
        if run is None:
            return
        try:
            self._take_run(run)
        except (DataError, TrainerError) as error:
            # Not fatal: the owner signs the task of new data only once devices can have them, and the stored run may be over.
            self._following.held = None
            facts = {"run": run.plan.run, "reason": error, "hint": error.hint}
            LOG.error("this device can't do the task of the stored run, and waits for a later run", extra={"kv": facts})
            self._tell(io.RunRefused(run.plan.run_id, decline_reason(error), None))
            self._results.refuse(run.plan.run, error, self.session, self._now_s)

    # --------------------------------------------------------------------------------------------------------- round

    def _take_model(self, model: io.ModelTransfer) -> None:
        assert self._models is not None
        try:
            taken = self._models.take(model.label, model.transfer, model.plain)
        except (IntegrityError, UntrustedError) as error:
            self._suspect(error)
            announcement = self.session.round.announcement
            if announcement is not None and self.session.round.stage is rounds.Stage.FETCHING:
                self._skip(announcement, error)
            raise
        if taken:
            model.plain.release()  # what calls this function still refers to it, while the job that follows begins
            self._tell(rounds.ModelArrived(model.label, self._models.name_of(model.label, model.transfer)))

    def _check_metered(self, announcement: Announcement) -> None:
        """Check that the device may use its link for a round.

        Raises:
            MeteredError: it may not.
        """
        hours = parse_hours(self._config.metered)
        if hours is not None and not announcement.finished and hours.now(self._clock_s()):
            raise MeteredError(f"the link is metered, {hours}", hint="the device takes part again after these hours")

    def _locate(self, announcement: Announcement, assignment: Assignment) -> None:
        assert self._models is not None
        try:
            self._check_metered(announcement)
            transfers = self._models.locate(announcement, assignment)
            arrived = self._models.arrived()
        except (IntegrityError, MeteredError, NotEnrolledError, UntrustedError) as error:
            self._skip(announcement, error)
            self._tell_history()
            return
        self._tell_history()
        ahead = self._models.labels_ahead(announcement, assignment)
        self._tell(rounds.Located(announcement.nonce, transfers, arrived, ahead))

    def _work(self, announcement: Announcement, assignment: Assignment) -> None:
        models = self._models
        assert models is not None
        try:
            thetas = models.thetas(announcement, assignment)
            self._results.renew(announcement, thetas)
            run_id, wasted = announcement.run_id, self.session.round.wasted
            residual = residual_for(self._uplink.residual, run_id, announcement.round, wasted)
            job = self._jobs.job(announcement, assignment, thetas, models, residual)
            self._results.warn(self._jobs.doubts)
        except (IntegrityError, UntrustedError) as error:
            self._skip(announcement, error)
            return
        finished = partial(self.on_result, announcement, assignment, models=thetas)
        self._worker.submit(job, lambda result: self._hand_back(lambda: finished(result=result)))
        # While the job trains. Its result is handed back to this thread, so no upload leaves before this returns.
        try:
            models.store(announcement)
        except StorageError:
            raise  # the session cancels the job
        except ConfigError as error:
            self._worker.cancel()
            self._skip(announcement, error)
            return
        if announcement.finished or announcement.round % HEAD_EVERY == 0:
            self._publish_presence(online=True)
        self._tell_history()  # a device that had left the run is back

    @property
    def _contrary(self) -> tuple[str, ...]:
        """Devices that have signed another history, or sealed another state, than this one was shown, in name order."""
        return tuple(sorted(self._bad_sealers.union(() if self._models is None else self._models.contrary)))

    def _suspect(self, error: ShoalError) -> None:
        """Tell the owner who has sealed a checkpoint that is of no use."""
        if isinstance(error, BadCheckpointError) and error.sealed_by:
            self._bad_sealers.add(error.sealed_by)
            self._tell_history()

    def _tell_history(self) -> None:
        """Publish the presence if the device has left its run or come back, or if others contradict its history."""
        contrary = self._contrary
        if contrary and contrary != self._told[1]:
            facts = {"run": self.session.round.mark.run, "devices": ", ".join(contrary)}
            LOG.warning(
                "devices have signed another history or state of the run: too few to believe", extra={"kv": facts}
            )
        if (self._models is not None and self._models.left, contrary) != self._told:
            self._publish_presence(online=True)

    def _skip(self, announcement: Announcement, error: ShoalError) -> None:
        facts = {"round": announcement.round, "reason": error, "hint": error.hint}
        LOG.log(
            logging.INFO if isinstance(error, MeteredError) else logging.ERROR, "round skipped", extra={"kv": facts}
        )
        self._results.skip(announcement, error)
        model = error.model if isinstance(error, NoSumError) else 0
        skipped = io.RoundSkipped(announcement, decline_reason(error), model)
        self._go_on(self.session.happened(skipped, self._facts()))
