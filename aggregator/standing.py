"""Standing orders: the aggregator starts the next run of the owner's newest order once that is due.

The order is a run package whose plan has a `Schedule`. It comes like a run, by a request or as a run file, and again whenever the
owner has drawn new keys; the newest is in force. A later run of it is a run file like any other: the same signed plan with a
turn, and the name of the run whose models it begins with. Which models those are, and which devices hold them, the presences say:
so an aggregator that has replaced another one goes on where that one ended.

Devices check turn, time and models themselves (`edge_client.run.policy.check_turn`, `edge_client.run.beginning`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from aggregator.membership import RUNS_DIRECTORY, AggregatorMembership
from aggregator.rounds.state import WORDS
from aggregator.status.answers import MOST_NAMES, ScheduleEntry
from aggregator.status.watch import FleetWatch
from aggregator.storage.signed_runs import ORDER_FILE, OwnerOrders, RunFiles, directory_of
from aggregator.storage.store import read_last_record
from aggregator.strategies.registry import settings_of
from shoal.errors import UntrustedError
from shoal.membership.signed_plans import open_package
from shoal.membership.statements import signers_needed
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Roster, RunPackage, RunPlan, Schedule
from shoal.protocol.messages import ModelsHeld
from shoal.util.console import counted, second
from shoal.util.files import read_if_there, write_atomic


class StandingOrders:
    """The owner's newest standing order.

    Args:
        membership: the aggregator's.
        files: its run files.
        orders: the owner's orders to pause, resume and stop; those of a standing order are under its id.
        watch: what devices say of themselves.
    """

    def __init__(
        self, membership: AggregatorMembership, files: RunFiles, orders: OwnerOrders, watch: FleetWatch
    ) -> None:
        self._membership = membership
        self._path = membership.directory / ORDER_FILE
        self._files = files
        self._orders = orders
        self._watch = watch
        self._since_s = watch.clock()

    def take(self, package: bytes, plan: RunPlan) -> None:
        """Store an order, or the same one under newer keys.

        Raises:
            UntrustedError: it is older than the one in force.
            ConfigError: the disk is full or fails.
        """
        known = self._newest()
        if known is not None and _age(plan) < _age(known[0]):
            raise UntrustedError(
                f"the standing order of runs from {plan.run} on is older than that from {known[0].run} on",
                hint="shoal-fleet schedule signs a new one",
            )
        write_atomic(self._path, package)

    @property
    def plan(self) -> RunPlan | None:
        """The signed plan of the newest order; None without one."""
        found = self._newest()
        return None if found is None else found[0]

    def entry(self) -> ScheduleEntry | None:
        """Return the newest order as the owner sees it; None without one."""
        found = self._newest()
        if found is None:
            return None
        plan, schedule, _ = found
        turn, waits, _ = self._next(plan, schedule)
        return ScheduleEntry(
            first=plan.run,
            count=schedule.count,
            begun=min(turn, schedule.count),
            algorithm=plan.recipe.algorithm,
            interval_s=schedule.interval_s,
            until_s=schedule.until_s,
            growth=schedule.growth,
            waits=waits,
            kept=self._kept(plan, schedule),
        )

    def begin_next(self) -> bool:
        """Write the file of the order's next run if it is due, and return whether it was; call it while no run is served."""
        found = self._newest()
        if found is None:
            return False
        plan, schedule, package = found
        turn, waits, before = self._next(plan, schedule)
        if waits:
            return False
        if before is not None:
            parts = decode(package, RunPackage)
            package = encode(
                dataclasses.replace(
                    parts,
                    origins=b"",
                    turn=turn,
                    models=before.models,
                    before=before.run,
                    transcript=before.transcript,
                )
            )
        write_atomic(self._membership.directory / RUNS_DIRECTORY / f"{plan.run + turn:06d}.run", package)
        return True

    def _newest(self) -> tuple[RunPlan, Schedule, bytes] | None:
        """Return plan, schedule and package of the newest order; None without one."""
        data = read_if_there(self._path)
        packages = [package for package in (data, self._membership.grant.order) if package]
        carried = [run for run in self._files.all() if run.plan.schedule is not None and not run.plan.turn]
        packages += [self._files.package(run) for run in carried[-1:]]
        plans = [(open_package(decode(p, RunPackage), self._membership.owner_key), p) for p in packages]
        found = [(plan, plan.schedule, p) for plan, p in plans if plan.schedule is not None]
        return max(found, key=lambda each: _age(each[0]), default=None)

    def _next(self, plan: RunPlan, schedule: Schedule) -> tuple[int, str, ModelsHeld | None]:
        """Return the turn of the next run, why it waits, or empty, and the models that it begins with, if it ships none."""
        files = [run.plan for run in self._files.all()]
        newest = max((run.run for run in files), default=0)
        held = self._held(plan, schedule)
        runs = Counter(models.run for models in held.values())
        needed = signers_needed(plan.recipe.min_contributors, self._members(plan).active_count)
        known = (run for run, count in runs.items() if count >= needed)
        turn = max((newest, plan.run - 1, *known)) - plan.run + 1
        now_s, order = self._watch.clock(), WORDS[self._orders.of(schedule.order)]
        if newest >= plan.run + schedule.count:
            return turn, f"ended by run {newest}", None
        if order:
            return turn, order, None
        if turn >= schedule.count:
            return turn, f"all of its {counted(schedule.count, 'run')} have begun", None
        if now_s > schedule.until_s:
            return turn, "its time is over", None
        if plan.key_version != self._membership.roster.keys_since:
            return turn, "the owner has drawn new keys and not signed the order under them", None
        if not turn:
            # Devices that are there would name an earlier run of the order, if another aggregator had begun one.
            here = len(self._online(plan))
            few = f"{counted(here, 'device')} online, and {needed} must be"
            return turn, "" if here >= needed else few, None
        due_s = self._ended_s(files) + schedule.interval_s
        if now_s < due_s:
            return turn, f"the next run begins at {second(int(due_s))} or later", None
        return turn, *self._start_of(plan, schedule, held, needed)

    def _kept(self, plan: RunPlan, schedule: Schedule) -> tuple[str, ...]:
        """Return the first MOST_NAMES devices that have ended the newest run and answer with the model of an earlier one."""
        over = [run.plan.run for run in self._files.all() if self._files.is_over(run.plan)]
        facts = self._watch.devices.devices
        ended = {d for d, held in self._held(plan, schedule).items() if over and held.run == over[-1]}
        return tuple(d for d in sorted(ended) if 0 < (facts[d].model_run or 0) < over[-1])[:MOST_NAMES]

    def _start_of(
        self, plan: RunPlan, schedule: Schedule, held: dict[str, ModelsHeld], needed: int
    ) -> tuple[str, ModelsHeld | None]:
        """Return why a later run has to wait for devices, or empty, and the models that it begins with."""
        starts = Counter((h.run, h.transcript, h.models) for h in held.values() if h.own)
        able = [start for start, count in starts.items() if count >= needed]
        if not able:
            most = max(starts.values(), default=0)
            return f"{counted(most, 'device')} online with the models of the run before, and {needed} must be", None
        run, transcript, models = max(able)
        if not settings_of(plan.recipe.algorithm, plan.recipe.values).begins_with(models):
            return f"{plan.recipe.algorithm} can't begin with the {models} models of run {run}", None
        grown, least = sum(h.grown for h in held.values()), plan.recipe.min_contributors
        if schedule.growth and grown < least:
            return f"the data of {counted(grown, 'device')} have grown by {schedule.growth} %, and {least} must", None
        return "", next(h for h in held.values() if (h.run, h.transcript, h.models) == (run, transcript, models))

    def _held(self, plan: RunPlan, schedule: Schedule) -> dict[str, ModelsHeld]:
        """Return the models of the order's runs that online devices hold, by device."""
        turns = range(schedule.count)
        known = {device: self._watch.held[device] for device in self._online(plan) if device in self._watch.held}
        return {
            device: held
            for device, held in known.items()
            if held.run - plan.run in turns and held.run_id == schedule.run_id(held.run - plan.run)
        }

    def _members(self, plan: RunPlan) -> Roster:
        """Return the roster of the devices that the order is for."""
        return self._membership.roster.only(plan.recipe.only)

    def _online(self, plan: RunPlan) -> list[str]:
        """Return the devices of the order that are online, in name order."""
        facts, active = self._watch.devices.devices, self._members(plan).active()
        return sorted(device for device in active if device in facts and facts[device].online)

    def _ended_s(self, files: list[RunPlan]) -> float:
        """Return the unix time at which the newest run ended; if that is unknown, the time at which this program began."""
        last = read_last_record(directory_of(self._membership, files[-1].run)) if files else None
        at_s = None if last is None else last.get("closed_at_s")
        return self._since_s if at_s is None else float(at_s)


def _age(plan: RunPlan) -> tuple[int, int]:
    return plan.run, plan.roster_sequence
