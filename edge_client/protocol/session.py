"""A device's part of the protocol as one frozen state: what it follows, what it waits for, and what it does next.

`DeviceSession` is pure: it opens no envelope, reads no clock and touches no disk, so any interleaving can be tested without a
transport, and the state of a device that is stuck can be printed (`DeviceSession.summary`, `shoal-edge status --json`).
`edge_client.runtime` opens envelopes, hands their contents to the session, and carries out its actions.

Rules:

- Every method returns the next session and the actions to carry out, in order. The outcome of an action comes back as an
  event (`happened`), before the next action is carried out.
- Messages are contents of envelopes that were opened, so they come from the party that the channel's row names. They may
  still be replays, of another run, or against the plan: the session refuses those with `Refuse`.
- While the roster has expired, the session hears only what may bring a newer one (`hears`).
- The round itself is a machine of its own, `edge_client.protocol.round_state`; its diagram is in docs/architecture.md.

Example: a device whose broker has a new announcement of a run that it does not know yet waits for the run package.

    session, actions = session.receive(channels.ANNOUNCEMENT, announcement, facts)
    session.missing                     # (Resubscribe(TopicKind.PLAN),)
    session, actions = session.tick(later)
    actions                             # (Resubscribe(TopicKind.ROUND),), once nothing has come for 5 s
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from edge_client.protocol import round_state as rounds
from edge_client.protocol import session_io as io
from edge_client.protocol.declining import Declines
from edge_client.protocol.presence import Attendance
from edge_client.protocol.resync import Missing, Resync
from edge_client.protocol.roster_sync import HEARD_LAPSED, STARTED, RosterSync
from shoal import limits
from shoal.errors import UntrustedError
from shoal.protocol import channels
from shoal.protocol.messages import ORDER_WORDS, Action, Announcement, Control, DeclineReason, Notice
from shoal.protocol.topics import TopicKind

if TYPE_CHECKING:
    from shoal.protocol.documents import RunPlan

ANNOUNCED_WITHIN_S: Final = 10.0
"""Time for which a device whose disk fails between two rounds waits for the next announcement, to decline it before it ends."""

NOTICE: Final = io.Resubscribe(TopicKind.NOTICE)
RETAINED: Final = (io.Resubscribe(TopicKind.PLAN), io.Resubscribe(TopicKind.ROUND), NOTICE)
"""Requests for the run package, the announcement and the notice, which may have come before the device could read them."""

Do = rounds.Do | io.Do
Steps = tuple["DeviceSession", tuple[Do, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that limit what the device accepts.

    Attributes:
        task: size of the task of the run in force, in bytes.
        package: size of the run package that the last announcement named, in bytes.
        models: number of models that it offered.
    """

    task: int = 0
    package: int = 0
    models: int = 0

    @property
    def most_package(self) -> int:
        """The largest run package that the device accepts, in bytes."""
        return max(limits.FIRST_PACKAGE_BYTES, self.package)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSession:
    """The session of one device.

    Attributes:
        name, fleet: of the device.
        round: the machine of the round.
        declines: the rounds and runs that the device has declined.
        roster, presence, lookout: the machines of the roster, of the presence, and of lost messages.
        late: a run that the device can only begin with a checkpoint; None if absent.
        labels: topic labels of the means and checkpoints that it follows.
        sizes: see `Sizes`.
        latest: the newest announcement; waiting: an announcement whose run package has not arrived yet.
        remind_at_s: time of the next reminder while an upload is being sent; None without one.
        turn: retransmissions of uploads so far, counted on from the device's incarnation.
        in_flight: chunks of the upload may still be on their way to the broker.
        unchecked: an announcement after which `settled` has not looked for missing messages yet.
        stop_at_s: the disk has failed: time at which the program ends if no announcement comes before; None if it works.
        notice: the newest notice of the owner's orders; None before the first.
        others: id of the newest run that is for devices with a label that this one lacks; empty without one.
    """

    name: str
    fleet: str
    round: rounds.RoundState
    declines: Declines
    roster: RosterSync = field(default_factory=RosterSync)
    presence: Attendance = field(default_factory=Attendance)
    lookout: Resync = field(default_factory=Resync)
    late: RunPlan | None = None
    labels: tuple[str, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)
    latest: Announcement | None = field(default=None, repr=False)
    waiting: Announcement | None = field(default=None, repr=False)
    remind_at_s: float | None = None
    turn: int = 0
    in_flight: bool = False
    unchecked: Announcement | None = field(default=None, repr=False)
    stop_at_s: float | None = None
    notice: Notice | None = field(default=None, repr=False)
    others: bytes = b""

    # -------------------------------------------------------------------------------------------------------- queries

    @property
    def plan(self) -> RunPlan | None:
        """The plan of the run in force."""
        return self.round.plan

    @property
    def stopped(self) -> bool:
        """Whether the device takes no part any more: it is revoked, its roster has expired, or its disk has failed."""
        return self.roster.revoked or self.roster.lapsed or self.stop_at_s is not None

    @property
    def idle(self) -> bool:
        """Whether no round needs the device, and no run has been announced after the one that it follows."""
        latest, plan = self.latest, self.plan
        if plan is None or self.stopped or self.waiting is not None or self.late is not None:
            return False
        return self.round.stage is rounds.Stage.IDLE and (latest is None or latest.run <= plan.run)

    @property
    def missing(self) -> Missing:
        """The retained messages that the device waits for."""
        models = tuple(io.Resubscribe(TopicKind.MODEL, label) for label in self.labels)
        if self.waiting is None:
            return models if self.round.stage is rounds.Stage.FETCHING else ()
        return models if self.late is not None else (io.Resubscribe(TopicKind.PLAN),)

    @property
    def order(self) -> str:
        """The owner's order for the run that is served, in words; empty for one that goes on."""
        notice = self.notice
        words = "" if notice is None else ORDER_WORDS[notice.order]
        return f"run {notice.run} is {words}" if notice is not None and words else ""

    def hears(self, kind: TopicKind) -> bool:
        """Whether the device reads messages on a kind of topic now."""
        if self.roster.revoked or (self.roster.lapsed and kind not in HEARD_LAPSED):
            return False
        return self.stop_at_s is None or kind is TopicKind.ROUND

    def works_on(self, announcement: Announcement) -> bool:
        """Whether the result of a job for ``announcement`` still counts."""
        mark = self.round.mark
        current = (mark.run, mark.round, mark.nonce) == (announcement.run, announcement.round, announcement.nonce)
        return current and not self.round.done and not self.stopped

    def summary(self) -> dict[str, Any]:
        """Return the session as plain values, without keys or vectors, for `shoal-edge status --json`."""
        mark, late = self.round.mark, self.late
        return {
            "stage": self.round.stage.value,
            "run": None if self.plan is None else self.plan.run,
            "round": mark.round,
            "answered": self.round.done,
            "announced": None if self.latest is None else {"run": self.latest.run, "round": self.latest.round},
            "waits_for": sorted({request.kind.name.lower() for request in self.missing}),
            "begins_with_checkpoint": None if late is None else late.run,
            "roster": {
                "revoked": self.roster.revoked,
                "expired": self.roster.lapsed,
                "wanted": self.roster.wanted or None,
            },
            "order": self.order,
            "declined": None if self.declines.last is None else self.declines.last[1].name.lower(),
            "reminders": self.round.attempt,
            "retransmissions": self.turn,
            "disk_failed": self.stop_at_s is not None,
        }

    # --------------------------------------------------------------------------------------------------------- inputs

    def started(self, facts: io.Facts) -> Steps:
        """Return the session once the program runs: it subscribes, and resumes the run that was followed before a restart."""
        kinds = (TopicKind.KEYS, TopicKind.PLAN, TopicKind.ROUND, TopicKind.NOTICE, TopicKind.CTL)
        session, checked = self.checked(facts)
        resume = () if session.roster.lapsed else (io.ResumeRun(),)
        return session, (*STARTED, *(io.Subscribe(kind) for kind in kinds), *checked, *resume)

    def checked(self, facts: io.Facts) -> Steps:
        """Return the session after a look at the roster's expiry. Call it before each message and tick."""
        roster, told = self.roster.checked(facts)
        if roster is self.roster:
            return self, told
        session = replace(self, roster=roster)
        if roster.lapsed:
            stop: tuple[Do, ...] = (rounds.CancelWork(),)
            if session.round.stage is rounds.Stage.WORKING:
                session, done = session._in_round(rounds.WorkFailed(session.round.mark.nonce), facts)
                stop = (*stop, *done)
            return session, (*told, *stop)
        session, under = session.group_followed(facts)
        session, present = session._connected(facts)
        resume = (io.ResumeRun(),) if session.plan is None else ()
        session, reminded = session._in_round(rounds.Reconnected(), facts)
        return session, (*told, *under, *present, *resume, *reminded, *RETAINED)

    def settled(self, facts: io.Facts) -> Steps:
        """Return the session after all actions of a message were carried out. Call it after each message.

        Messages that the device has waited for since its last request are re-requested once an announcement shows that they
        are lost, and the broadcast key may have changed.
        """
        session, asked = self._missing_looked_for()
        session, checked = session.checked(facts)
        session, under = session.group_followed(facts)
        return session, (*asked, *checked, *under)

    def group_followed(self, facts: io.Facts) -> Steps:
        """If the broadcast key has changed, announce presence under the new key and re-fetch the retained announcement."""
        if not self.presence.is_stale(facts) or self.roster.lapsed:
            return self, ()
        told = io.Log("info", "new broadcast key", {"roster": facts.roster.sequence})
        presence, done = self.presence.announced(facts)
        return replace(self, presence=presence), (told, *done, io.Resubscribe(TopicKind.ROUND), NOTICE)

    def arrived(self, now_s: float) -> DeviceSession:
        """Return the session after a chunk of any message."""
        lookout = self.lookout.heard(now_s)
        return self if lookout is self.lookout else replace(self, lookout=lookout)

    def receive(self, channel: channels.Channel, content: Any, facts: io.Facts) -> Steps:
        """Take a message.

        Args:
            channel: its channel.
            content: the decoded message of an announcement, a notice, a control message or a roster change; a `ModelTransfer`
                for a mean or a checkpoint; else the bytes in the envelope, or for keys the envelope.
            facts: the surroundings.
        """
        match channel:
            case channels.KEYS:
                return self, (io.TakeGrant(content),)
            case channels.ROSTER | channels.REVOCATION:
                return self, (io.AdoptRoster(content),)
            case channels.ROSTER_CHANGE:
                roster, done = self.roster.changed(content, facts)
                return replace(self, roster=roster), done
            case channels.RUN:
                return self, (io.OpenRun(content),)
            case channels.MEAN | channels.CHECKPOINT | channels.MEAN_PART:
                return self, self._model(content)
            case channels.ANNOUNCEMENT | channels.ANNOUNCED_AGAIN:
                return self._announced(content, facts)
            case channels.CONTROL:
                return self._controlled(content, facts)
            case channels.NOTICE:
                return self._noticed(content, facts)
        raise AssertionError(channel.name)

    def happened(self, event: Any, facts: io.Facts) -> Steps:
        """Take an event of `edge_client.protocol.session_io`, or an event of the round."""
        match event:
            case io.Connected():
                session, reminded = self._in_round(rounds.Reconnected(), facts)
                session, present = session._connected(facts)
                return session, (*reminded, *present)
            case io.RosterTaken():
                return self._roster_taken(event, facts)
            case io.KeysTaken():
                told = io.Log("info", "newer keys", {"roster": facts.key_version})
                return self, (io.OfferReceivingKeys(), told, *self.roster.after_keys(), *RETAINED)
            case io.RunFollowed(plan, task_bytes, lost):
                sizes = replace(self.sizes, task=task_bytes)
                session = replace(self, sizes=sizes, late=None, declines=self.declines.followed())
                return session._in_round(rounds.Planned(plan, lost), facts)
            case io.RunStored():
                return self._announced_again(facts)
            case io.RunNeedsCheckpoint(plan):
                return replace(self, late=plan)._announced_again(facts)
            case io.RunForOthers(run_id):
                return replace(self, waiting=None, unchecked=None, others=run_id), ()
            case io.RunRefused(_, DeclineReason.STATE, late) if late is not None and self.waiting is not None:
                # The next checkpoint, perhaps by another device, has the same label.
                session, dropped = replace(self, late=late)._followed(())
                session, declined = session._decline(self.waiting, DeclineReason.STATE)
                return session, (*dropped, *declined)
            case io.RunRefused(run_id, reason, late):
                declines, new = self.declines.run_refused(run_id, reason)
                session = replace(self, declines=declines, late=late)
                return session._announced_again(facts) if new else (session, ())
            case io.CheckpointLocated(announcement, labels):
                return self._begins_late(announcement, labels)
            case io.RoundSkipped(announcement, reason, model):
                session, declined = self._decline(announcement, reason, model)
                session, done = session._in_round(rounds.WorkFailed(announcement.nonce), facts)
                return session, (*declined, *done)
            case io.DiskFailed():
                return self._disk_failed(facts)
        return self._in_round(event, facts)

    def _roster_taken(self, taken: io.RosterTaken, facts: io.Facts) -> Steps:
        roster, over = self.roster.taken(taken.change, facts)
        # With other labels a run of others may be ours.
        session = replace(self, roster=roster, others=b"")
        if taken.replaced and not roster.revoked:
            session, ended = session._replaced(facts)
            return session, (*over, *ended)
        again = (io.Resubscribe(TopicKind.ROUND),) if self.others and not roster.revoked else ()
        return session, (*over, *again, *((rounds.CancelWork(),) if roster.revoked else ()))

    def tick(self, facts: io.Facts) -> Steps:
        """Do the work that is due: reminders, presence, requests for lost messages."""
        if self.stop_at_s is not None:
            return self, (io.Stop(),) if facts.now_s >= self.stop_at_s else ()
        roster, asked_whole = self.roster.ticked(facts)
        session = self if roster is self.roster else replace(self, roster=roster)
        session, checked = session.checked(facts)
        done: tuple[Do, ...] = (*asked_whole, *checked)
        if session.roster.revoked or session.roster.lapsed:
            return session, done
        if session.remind_at_s is not None and facts.now_s >= session.remind_at_s:
            session, reminded = session._reminder_due(facts)
            done = (*done, *reminded)
        presence, repeated = session.presence.ticked(facts, session.lookout.heard_s)
        lookout, asked = session.lookout.asking() if repeated else (session.lookout, ())
        lookout, looked = lookout.ticked(facts.now_s, session.missing)
        if (presence, lookout) != (session.presence, session.lookout):
            session = replace(session, presence=presence, lookout=lookout)
        noticed = (NOTICE,) if repeated else ()
        return session, (*done, *repeated, *asked, *noticed, *looked)

    # ------------------------------------------------------------------------------------------------------- messages

    def _model(self, model: io.ModelTransfer) -> tuple[Any, ...]:
        if model.label not in self.labels:
            return ()
        if self.late is not None:
            return (io.BeginWithCheckpoint(model),)
        return () if self.plan is None else (io.TakeModel(model),)

    def _announced(self, announcement: Announcement, facts: io.Facts) -> Steps:
        if announcement.run_id == self.others:
            return self, ()
        session = replace(self, latest=announcement)
        if session.stop_at_s is not None:
            session, declined = session._decline(announcement, DeclineReason.DISK)
            return session, (*declined, io.Stop())
        plan = session.plan
        if plan is not None and announcement.run < plan.run:
            return session, ()
        before = session.sizes.most_package
        sizes = replace(session.sizes, package=announcement.package_bytes, models=len(announcement.held.offers))
        session = replace(session, sizes=sizes)
        if plan is None or announcement.run_id != plan.run_id:
            # The announcement overtook its run package: handle it when that has arrived.
            session = replace(session, waiting=announcement, unchecked=announcement)
            if session.late is not None and session.late.run_id == announcement.run_id:
                return session, (io.LocateCheckpoint(announcement),)
            package = io.Resubscribe(TopicKind.PLAN)
            larger = sizes.most_package > before and package in session.missing
            return session, (package,) if larger else ()
        # A round that was begun before the newer keys came is finished under its own.
        begun = announcement.nonce == session.round.mark.nonce
        if not (begun or announcement.finished) and facts.keys_since > announcement.held.key_version:
            line = io.Log("info", "round declined: the owner has replaced its keys", {"round": announcement.round})
            session, declined = session._decline(announcement, DeclineReason.KEYS)
            return session, (line, *declined)
        try:
            session, done = session._in_round(rounds.Announced(announcement), facts)
        except UntrustedError as error:
            # A replay would otherwise make the device speak.
            newer = announcement.place > session.round.mark.place
            session, told = session._decline(announcement, DeclineReason.REFUSED) if newer else (session, ())
            return session, (*told, io.Refuse(error))
        return replace(session, waiting=None, unchecked=announcement), done

    def _missing_looked_for(self) -> Steps:
        announcement = self.unchecked
        if announcement is None:
            return self, ()
        lookout, again, repeats = self.lookout.announced(announcement.nonce, self.missing)
        session = replace(self, lookout=lookout, unchecked=None)
        if repeats:
            return session, again
        waits = announcement is session.waiting
        decline = session.declines.unable_to_follow if waits else session.declines.again
        declines, declined = decline(announcement)
        return replace(session, declines=declines), declined

    def _announced_again(self, facts: io.Facts) -> Steps:
        """Handle the announcement that waited for its run."""
        waiting = self.waiting
        if waiting is None:
            return self, ()
        return replace(self, waiting=None)._announced(waiting, facts)

    def _replaced(self, facts: io.Facts) -> Steps:
        """End the run of an aggregator that the owner has replaced, and ask for what the new one has published."""
        session = replace(self, latest=None, waiting=None, unchecked=None, late=None, notice=None)
        session, ended = session._in_round(rounds.Ended(), facts)
        run = "-" if self.plan is None else self.plan.run
        line = io.Log(
            "warning", "the owner has replaced the aggregator: the run ends here, with its newest model", {"run": run}
        )
        return session, (line, *ended, *RETAINED)

    def _begins_late(self, announcement: Announcement, labels: tuple[str, ...]) -> Steps:
        session, done = self._followed(tuple(sorted(labels)))
        if labels:
            return session, done
        session, declined = session._decline(announcement, DeclineReason.STATE)
        return session, (*done, *declined)

    def _controlled(self, control: Control, facts: io.Facts) -> Steps:
        if self.roster.lapsed:
            return self, ()
        if (control.fleet, control.device) != (self.fleet, self.name):
            return self, (io.Refuse(UntrustedError(f"a control message for {control.device!r}")),)
        told: tuple[Do, ...] = ()
        if control.action == Action.REFUSED:
            told = (io.Log("warning", "upload refused", {"round": control.round, "reason": control.reason}),)
        session, done = self._in_round(rounds.Answered(control), facts)
        return session, (*told, *done, io.PublishStatus())

    def _noticed(self, notice: Notice, facts: io.Facts) -> Steps:
        """Take the owner's orders, unless it is an older notice that the broker repeats.

        A newer one may be that of an aggregator that has just started and knows no presences: the device repeats its own.
        """
        before = self.notice
        if notice.fleet != self.fleet:
            return self, (io.Refuse(UntrustedError(f"a notice of fleet {notice.fleet!r}")),)
        if before is not None and notice.sequence < before.sequence:
            return self, ()
        session = replace(self, notice=notice)
        if before is not None and notice.sent_at_s > before.sent_at_s:
            session = replace(session, presence=self.presence.soon(facts))
        done: list[Do] = []
        if session.order != self.order:
            done.append(io.Log("info", session.order or "no order of the owner any more", {}))
        new = before is None or notice.choice != before.choice
        return session, (*done, io.TakeNotice(notice.sent_at_s, notice.choice if new else b""), io.PublishStatus())

    # ---------------------------------------------------------------------------------------------------------- parts

    def _connected(self, facts: io.Facts) -> Steps:
        presence, done = self.presence.connected(facts)
        return replace(self, presence=presence), done

    def _decline(self, announcement: Announcement, reason: DeclineReason, model: int = 0) -> Steps:
        declines, done = self.declines.decline(announcement, reason, model)
        return replace(self, declines=declines), done

    def _disk_failed(self, facts: io.Facts) -> Steps:
        """Decline the round, then end the program.

        If the open round does not wait for this device, the program ends with the next announcement, so that the aggregator
        learns why the device stops: see `ANNOUNCED_WITHIN_S`.
        """
        first, session = self.stop_at_s is None, self
        if first:
            session = replace(self, stop_at_s=facts.now_s + ANNOUNCED_WITHIN_S)
        done = (rounds.CancelWork(),) if first else ()
        asked = self.waiting is not None or self.round.stage in (rounds.Stage.FETCHING, rounds.Stage.WORKING)
        if self.latest is None or (first and not asked):
            return session, done
        session, declined = session._decline(self.latest, DeclineReason.DISK)
        return session, (*done, *declined, io.Stop())

    def _reminder_due(self, facts: io.Facts) -> Steps:
        if facts.busy:
            # A slow link is still at work: a reminder would only add to its load.
            return replace(self, remind_at_s=facts.within(limits.REMIND_BASE_S)), ()
        return self._in_round(rounds.TimerFired(), facts)

    def _in_round(self, event: rounds.Event, facts: io.Facts) -> Steps:
        """Let the machine of the round take an event.

        Raises:
            UntrustedError: an announcement that is a replay, or that the plan does not allow.
        """
        state, wanted = rounds.step(self.round, event)
        session = replace(self, round=state)
        if state.stage is not rounds.Stage.SENDING:
            session = replace(session, remind_at_s=None)
        elif wanted:  # the upload, or a reminder of it
            session = replace(session, remind_at_s=facts.within(rounds.remind_within_s(state)))
        done: list[Do] = []
        for action in wanted:
            more: tuple[Do, ...] = (action,)
            match action:
                case rounds.Follow(labels):
                    session, more = session._followed(labels)
                case rounds.Send():
                    session, more = session._sent(action, facts)
                case rounds.Remind(run_id, reconnected):
                    session, more = session._reminded(run_id, facts, reconnected=reconnected)
            done.extend(more)
        return session, tuple(done)

    def _followed(self, labels: tuple[str, ...]) -> Steps:
        """Subscribe to the models with these topic labels, and to no others."""
        over = [label for label in self.labels if label not in labels]
        done: list[Do] = []
        for label in over:
            done += [io.Unsubscribe(TopicKind.MODEL, label), io.DropModel(label)]
        done += [io.Subscribe(TopicKind.MODEL, label) for label in labels if label not in self.labels]
        return replace(self, labels=labels), tuple(done)

    def _sent(self, send: rounds.Send, facts: io.Facts) -> Steps:
        """Send the upload, or chunks that the aggregator asked for unless they are still on their way to the broker."""
        again = send.chunks is not None
        if again and self.in_flight and facts.busy:
            return self, ()
        return replace(self, turn=self.turn + again, in_flight=True), (send,)

    def _reminded(self, run_id: bytes, facts: io.Facts, *, reconnected: bool) -> Steps:
        """Send a reminder, unless chunks of the upload are still on their way to the broker."""
        if self.in_flight and facts.busy:
            return self, ()
        # Later unacknowledged publishes are other messages.
        session = replace(self, in_flight=False, turn=self.turn + reconnected)
        return session, (io.SendReminder(run_id, session.turn),)
