"""Carry out the owner's requests: store a run, order it to pause, go on or stop, and report.

The daemon and the loopback fleet hand over each verified request; `aggregator.owner_requests` verifies them and answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from aggregator.membership import RUNS_DIRECTORY, AggregatorMembership
from aggregator.rounds.standstill import named
from aggregator.rounds.state import WORDS, Order, RunPhase, may_follow, phase_of
from aggregator.run_log import cluster_sizes
from aggregator.run_service import RunService
from aggregator.standing import StandingOrders
from aggregator.status import versions
from aggregator.status.answers import (
    MOST_NAMES,
    QUEUED,
    STOPPED_UNBEGUN,
    LogRecord,
    RunEntry,
    RunPage,
    cut,
)
from aggregator.status.record import NOT_SERVED, REVOKED, FleetStatus
from aggregator.status.stored import fleet_status, stored_run
from aggregator.status.watch import FleetWatch
from aggregator.storage.signed_runs import (
    OwnerOrders,
    RunFile,
    RunFiles,
    check_assignment,
    directory_of,
    is_finished,
    is_void,
)
from aggregator.storage.store import read_latest_records, read_plan, read_records, readable
from aggregator.strategies.registry import TooManyComparedError
from crypto.seal.identity import open_document
from shoal import limits
from shoal.errors import IntegrityError, ShoalError, UntrustedError, WireVersionError
from shoal.membership.signed_plans import open_package
from shoal.protocol.codec import decode
from shoal.protocol.documents import ModelChoice, RunPackage, RunPlan
from shoal.protocol.requests import Outcome, OwnerRequest, RequestAction
from shoal.util.console import counted
from shoal.util.files import write_atomic
from shoal.version import VERSION

ORDERS: Final = {
    RequestAction.PAUSE: Order.PAUSE,
    RequestAction.RESUME: Order.GO,
    RequestAction.STOP: Order.STOP,
}
"""The order of each action that gives one; a stop with ``now`` is `Order.STOP_NOW`."""


class UnfulfilledError(ShoalError):
    """A request that is authentic and can't be carried out.

    Attributes:
        outcome: of the answer.
    """

    def __init__(self, outcome: Outcome, reason: str, *, hint: str = "") -> None:
        super().__init__(reason, hint=hint)
        self.outcome = outcome


class RunControl:
    """Carries out requests at one aggregator.

    Args:
        membership: the aggregator's.
        orders: the owner's orders, on disk.
        serving: returns the service that is open now, also of a finished run; None without one.
        refresh: writes the daemon's facts for `status`; called before they are read.
        watch: what devices say of themselves.

    Attributes:
        standing: the owner's standing order.
    """

    def __init__(
        self,
        membership: AggregatorMembership,
        orders: OwnerOrders,
        serving: Callable[[], RunService | None],
        refresh: Callable[[], None] = lambda: None,
        watch: FleetWatch | None = None,
    ) -> None:
        self._membership = membership
        self._orders = orders
        self._serving = serving
        self._refresh = refresh
        self._files = RunFiles(membership, lambda _name, _reason: None)
        self._changed: list[RunPlan] = []
        self.standing = StandingOrders(membership, self._files, orders, watch or FleetWatch())

    def carry_out(self, request: OwnerRequest, package: bytes) -> RunPage | FleetStatus:
        """Carry out a request and return the document of the answer; the request's number is durable on return.

        An order is durable then too, and `apply` puts it in force.

        Args:
            request: authentic, not expired and not accepted before.
            package: the run package of a request to start; empty otherwise.

        Raises:
            UnfulfilledError: the request can't be carried out.
            ConfigError: the disk is full or fails.
        """
        action = request.known
        if action is None:
            self._orders.accept(request.sequence)
            raise UnfulfilledError(
                Outcome.NOT_NOW,
                f"this aggregator (shoal {VERSION}) does not know the request",
                hint="upgrade the aggregator, or use an earlier shoal-fleet",
            )
        if request.schedule:
            return self._of_schedule(request)
        if action in ORDERS:
            return RunPage((self._order(request),))
        if action is RequestAction.CHOOSE:
            return RunPage(self._choose(request, package))
        self._orders.accept(request.sequence)
        match action:
            case RequestAction.START:
                return self._start(package)
            case RequestAction.LIST:
                return RunPage(tuple(map(self._entry, self._files.all())))
            case RequestAction.STATUS:
                return self._status()
            case _:
                return self._logs(request)

    # ---------------------------------------------------------------------------------------------------------- start

    def _start(self, package: bytes) -> RunPage:
        """Store a run as if its file had been carried here; the same run again changes nothing."""
        plan, signed = self._opened(package)
        if plan.schedule is not None:
            try:
                self.standing.take(package, plan)
            except UntrustedError as error:
                raise UnfulfilledError(Outcome.REFUSED, str(error), hint=error.hint) from error
            return RunPage((), schedule=self.standing.entry())
        known = self._numbered(plan.run)
        if known is None:
            self._check_startable(plan)
            write_atomic(self._membership.directory / RUNS_DIRECTORY / f"{plan.run:06d}.run", package)
            known = self._numbered(plan.run)
        if known is None or known.signed != signed:
            raise UnfulfilledError(
                Outcome.REFUSED,
                f"another run {plan.run} is here",
                hint="sign the run again: it gets another number. Was the owner's directory restored from a backup?",
            )
        entry = dataclasses.replace(self._entry(known), left_out=self._left_out(plan), short=self._short(plan))
        return RunPage((entry,))

    def _left_out(self, plan: RunPlan) -> tuple[str, ...]:
        """Return the first MOST_NAMES devices of the roster that are known not to speak the run's wire version."""
        self._refresh()
        devices = fleet_status(self._membership, ()).devices
        return tuple(
            f"{d.name} ({versions.named(d.version, d.wire)})"
            for d in devices
            if d.wire is not None and d.reason != REVOKED and d.wire != plan.wire
        )[:MOST_NAMES]

    def _short(self, plan: RunPlan) -> tuple[str, ...]:
        """Return the first MOST_NAMES devices whose vitals say that the run's model won't fit their free memory."""
        needed = limits.DEVICE_BYTES_A_COORDINATE * plan.length
        devices = fleet_status(self._membership, ()).devices
        told = [(d.name, d.vitals.memory_free_bytes) for d in devices if d.vitals is not None and d.reason != REVOKED]
        return tuple(
            f"{name} ({free >> 20} MB free, about {needed >> 20} needed)"
            for name, free in told
            if free is not None and free < needed
        )[:MOST_NAMES]

    def _opened(self, package: bytes) -> tuple[RunPlan, bytes]:
        try:
            parts = decode(package, RunPackage)
            plan, signed = open_package(parts, self._membership.owner_key), parts.plan
        except WireVersionError as error:
            hint = "upgrade the aggregator" if error.later else error.hint
            raise UnfulfilledError(Outcome.REFUSED, str(error), hint=hint) from error
        except ShoalError as error:
            raise UnfulfilledError(Outcome.REFUSED, f"no run of this fleet: {error}", hint=error.hint) from error
        if plan.fleet != self._membership.fleet:
            raise UnfulfilledError(Outcome.REFUSED, f"a run of fleet {plan.fleet!r}")
        return plan, signed

    def _check_startable(self, plan: RunPlan) -> None:
        """Check that devices would accept the run, as far as that is known now."""
        try:
            is_finished(self._membership, plan)
            check_assignment(self._membership, plan)
        except (UntrustedError, IntegrityError, TooManyComparedError) as error:
            raise UnfulfilledError(Outcome.REFUSED, str(error), hint=error.hint) from error

    # --------------------------------------------------------------------------------------------------------- orders

    def _order(self, request: OwnerRequest) -> RunEntry:
        """Pause, resume or stop a run; the same order again changes nothing."""
        order = Order.STOP_NOW if request.now else ORDERS[RequestAction(request.action)]
        try:
            run = self._known(request.run)
            self._check_order(run.plan, order)
        except UnfulfilledError:
            self._orders.accept(request.sequence)
            raise
        self._orders.accept(request.sequence, run.plan.run_id, order)
        self._changed.append(run.plan)
        return self._entry(run)

    def _of_schedule(self, request: OwnerRequest) -> RunPage:
        """Report the standing order, or pause, resume or stop it: the run that is under way goes on."""
        plan = self.standing.plan
        if plan is None or plan.schedule is None:
            self._orders.accept(request.sequence)
            raise UnfulfilledError(
                Outcome.UNKNOWN, "the aggregator has no standing order", hint="shoal-fleet schedule signs one"
            )
        order, before = ORDERS.get(RequestAction(request.action)), self._orders.of(plan.schedule.order)
        if order is None:
            self._orders.accept(request.sequence)
        elif not may_follow(before, order):
            self._orders.accept(request.sequence)
            raise UnfulfilledError(
                Outcome.NOT_NOW, "the standing order was stopped", hint="shoal-fleet schedule signs a new one"
            )
        else:
            self._orders.accept(request.sequence, plan.schedule.order, order)
        return RunPage((), schedule=self.standing.entry())

    def apply(self, now_s: float) -> None:
        """Put new orders in force at the service that is open.

        The driver calls it after the request is answered. An error of the service, such as a full disk, is none of the request's,
        and ends the program as it always does.
        """
        changed, self._changed = self._changed, []
        for plan in changed:
            service = self._service_of(plan)
            if service is not None:
                service.obey(self._orders.of(plan.run_id), now_s)

    def _check_order(self, plan: RunPlan, order: Order) -> None:
        before = self._orders.of(plan.run_id)
        if self._is_over(plan) and not (order.stops and before.stops):
            raise UnfulfilledError(
                Outcome.NOT_NOW, f"run {plan.run} is over", hint="shoal-fleet run list shows the others"
            )
        if not may_follow(before, order) and not order.stops:
            raise UnfulfilledError(
                Outcome.NOT_NOW, f"run {plan.run} was stopped", hint="a stopped run does not go on: sign a new one"
            )
        closed = self._closed(plan)
        if order.stops and plan.recipe.rounds - closed > limits.MAX_ROUNDS:
            raise UnfulfilledError(
                Outcome.NOT_NOW,
                f"run {plan.run} has {plan.recipe.rounds - closed} rounds left, and devices skip {limits.MAX_ROUNDS} at most",
                hint="pause it, or take its file out of the aggregator's runs directory; a later run takes its place",
            )

    def _closed(self, plan: RunPlan) -> int:
        service = self._service_of(plan)
        return service.state.held.closed if service is not None else _last_round(self._latest(plan, 2))

    def _is_over(self, plan: RunPlan) -> bool:
        return self._files.is_over(plan) or is_void(self._membership, plan, self._orders.of(plan.run_id))

    def _choose(self, request: OwnerRequest, signed: bytes) -> tuple[RunEntry, ...]:
        """Store the owner's choice of models for the devices; return its run, if it is here."""
        try:
            choice = open_choice(self._membership, signed)
            if signed != self._orders.choice:
                self._check_newer(choice)
        except UnfulfilledError:
            self._orders.accept(request.sequence)
            raise
        self._orders.choose(signed)
        self._orders.accept(request.sequence)
        known = self._numbered(choice.run)
        return () if known is None else (self._entry(known),)

    def _check_newer(self, choice: ModelChoice) -> None:
        before = open_choice(self._membership, self._orders.choice) if self._orders.choice else None
        if before is not None and choice.sequence <= before.sequence:
            raise UnfulfilledError(
                Outcome.REFUSED, f"choice {choice.sequence} of models comes after choice {before.sequence}"
            )

    # -------------------------------------------------------------------------------------------------------- reports

    def _status(self) -> FleetStatus:
        self._refresh()
        runs = self._files.all()
        service = self._serving()
        plans = [run.plan for run in runs]
        served = next((p for p in plans if service is not None and not service.finished and p == service.plan), None)
        chosen = served or next((p for p in plans if not self._over_or_damaged(p)), plans[-1] if plans else None)
        stored = () if chosen is None else (self._stored(chosen),)
        return cut(fleet_status(self._membership, stored))

    def _stored(self, plan: RunPlan) -> Any:
        directory = directory_of(self._membership, plan.run)
        order = self._orders.of(plan.run_id)
        records = read_records(directory)
        with readable(directory):
            return stored_run(plan, records, order, void=is_void(self._membership, plan, order))

    def _over_or_damaged(self, plan: RunPlan) -> bool:
        try:
            return self._is_over(plan)
        except ShoalError:
            return True

    def _logs(self, request: OwnerRequest) -> RunPage:
        run = self._known(request.run)
        directory = directory_of(self._membership, run.plan.run)
        with readable(directory):
            records = tuple(map(_log_record, self._latest(run.plan, request.records)))
        return RunPage((self._entry(run),), records)

    def _entry(self, run: RunFile) -> RunEntry:
        plan, stored_at_s = run.plan, None
        with suppress(OSError):
            stored_at_s = int(run.path.stat().st_mtime)
        obstacle, records = "", list[dict[str, Any]]()
        try:
            phase, records = self._phase(plan), self._latest(plan, 2)
        except (UntrustedError, IntegrityError, TooManyComparedError) as error:
            phase, obstacle = NOT_SERVED, str(error)
        service = self._service_of(plan)
        return RunEntry(
            run=plan.run,
            run_id=plan.run_id,
            algorithm=plan.recipe.algorithm,
            phase=phase,
            round=_last_round(records)
            if service is None or service.finished
            else min(service.state.round, plan.recipe.rounds),
            rounds=plan.recipe.rounds,
            order=WORDS[self._orders.of(plan.run_id)],
            obstacle=obstacle,
            stored_at_s=stored_at_s,
            round_at_s=records[-1].get("closed_at_s") if records else None,
            wire=plan.wire,
        )

    def _phase(self, plan: RunPlan) -> str:
        service = self._service_of(plan)
        if self._files.is_over(plan):
            return RunPhase.FINISHED.value
        if is_void(self._membership, plan, self._orders.of(plan.run_id)):
            return STOPPED_UNBEGUN
        if service is not None:
            return phase_of(service.state).value
        check_assignment(self._membership, plan)
        return NOT_SERVED if read_plan(directory_of(self._membership, plan.run)) else QUEUED

    # --------------------------------------------------------------------------------------------------------- look-up

    def _latest(self, plan: RunPlan, count: int) -> list[dict[str, Any]]:
        return read_latest_records(directory_of(self._membership, plan.run), count)

    def _numbered(self, number: int) -> RunFile | None:
        return next((run for run in self._files.all() if run.plan.run == number), None)

    def _known(self, number: int) -> RunFile:
        run = self._numbered(number)
        if run is None:
            raise UnfulfilledError(
                Outcome.UNKNOWN,
                f"the aggregator has no run {number}",
                hint="shoal-fleet run list shows the runs that it has",
            )
        return run

    def _service_of(self, plan: RunPlan) -> RunService | None:
        service = self._serving()
        return service if service is not None and service.plan.run_id == plan.run_id else None


def open_choice(membership: AggregatorMembership, signed: bytes) -> ModelChoice:
    """Return the owner's choice of models after checking its signature.

    Raises:
        UnfulfilledError: the owner has not signed it, or it is of another fleet.
    """
    try:
        choice = open_document(signed, ModelChoice, membership.owner_key)
    except ShoalError as error:
        raise UnfulfilledError(Outcome.REFUSED, f"no choice of this fleet's owner: {error}", hint=error.hint) from error
    if choice.fleet != membership.fleet:
        raise UnfulfilledError(Outcome.REFUSED, f"a choice for fleet {choice.fleet!r}")
    return choice


def _last_round(records: list[dict[str, Any]]) -> int:
    """Return the last round of training in a run's last records."""
    return next((int(r["round"]) for r in reversed(records) if not r["final"]), 0)


def _log_record(record: dict[str, Any]) -> LogRecord:
    missing, declined = tuple(record["missing"]), dict(record.get("declined", {}))
    return LogRecord(
        round=record["round"],
        final=bool(record["final"]),
        closed_at_s=record.get("closed_at_s"),
        seconds=float(record["seconds"]),
        ordered=record["ordered"],
        contributed=record["contributed"],
        absent=len(missing),
        missing=missing[:MOST_NAMES],
        declined=dict(list(declined.items())[:MOST_NAMES]),
        loss=float(record["loss"]),
        correct=record["correct"],
        tested=record["tested"],
        cluster_sizes=tuple(cluster_sizes(record["clusters"])),
        events=tuple(map(event_words, record["events"])),
        bytes_up=record["bytes_up"],
    )


def event_words(event: Mapping[str, Any]) -> str:
    """Return an event's kind, with the devices that it names, or the number of a look."""
    kind, devices = str(event["kind"]), event.get("devices")
    if kind == "look":
        return f"look {event['used']} at {counted(int(event['devices']), 'device')}"
    return f"{kind} ({named(devices)})" if isinstance(devices, list) and devices else kind
