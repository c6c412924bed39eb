"""From the loop's facts and the stored rounds to the snapshot that all requests read.

The daemon's loop calls `Feed.publish` once in UPDATE_S; it only replaces a reference. A thread that wants the state calls
`Feed.current`, which builds a snapshot at most once in UPDATE_S, and reads only the rounds that have closed since. Without
requests nothing is built.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aggregator.status.record import SILENT_S, Facts, FleetStatus, build
from aggregator.status.stored import stored_run
from aggregator.storage.store import read_plan, take_records
from shoal.errors import ShoalError, reason_of
from shoal.page.history import Record, RunHistory, Totals
from shoal.page.page import MOST_RUNS
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPlan
from shoal.util.console import second
from shoal.util.files import free_bytes_of

LOG = logging.getLogger("shoal.aggregator")
UPDATE_S: Final = 1.0
"""Least time between two snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the fleet at one time; nothing in it changes.

    Attributes:
        status: the record that `shoal-aggregator status` prints.
        runs: the served run's history as JSON has it; empty without a run.
        earlier: those of the runs before, the newest first.
        totals, last: sums over the run's rounds, and its last closed round; None and empty without one.
        clusters: cluster -> number of devices.
        disk_free_bytes: of the aggregator's directory; None if it can't be read.
        expires: certificate, or ``roster`` -> unix seconds at which it expires.
        made_at_s: unix seconds.
        status_text, runs_text: both as JSON; the numbers rise when the text changes.
        status_serial, runs_serial: these numbers.
        trouble: why the run's rounds can't be read; empty if they can.
    """

    status: FleetStatus
    runs: tuple[Mapping[str, Any], ...]
    totals: Totals | None
    last: Record
    clusters: Mapping[int, int]
    disk_free_bytes: int | None
    made_at_s: int
    status_text: str
    runs_text: str
    status_serial: int
    runs_serial: int
    trouble: str = ""
    expires: Mapping[str, int] = field(default_factory=dict)
    earlier: tuple[Mapping[str, Any], ...] = ()

    def event(self, *, runs: bool) -> str:
        """Return the data of an event for the page: the status, and with ``runs`` the run's history."""
        history = f',"runs":{self.runs_text}' if runs else ""
        head = f'"made_at":"{second(self.made_at_s)}","note":{_json(self.trouble)}'
        return f'{{{head},"status":{self.status_text}{history}}}'


class _StoredHistory:
    """The history of one run, which follows its directory."""

    def __init__(self, plan: RunPlan, directory: Path) -> None:
        self.plan = plan
        self.history = RunHistory(name=f"run {plan.run}", algorithm=plan.recipe.algorithm, rounds=plan.recipe.rounds)
        self._directory = directory
        self._clustered: Record | None = None
        self._tested: Record | None = None

    def follow(self) -> bool:
        """Add the rounds that have closed since, and return whether there were any."""
        before = self.history.closed
        take_records(self._directory, before, self._take)
        return self.history.closed != before

    def _take(self, record: Record) -> None:
        self.history.add(record)
        self._clustered = record if record["clusters"] else self._clustered
        self._tested = record if record["device_accuracy"] else self._tested

    def newest(self) -> list[Record]:
        """Return the rounds by which `stored_run` decides: the last with clusters, the last with accuracies, the last."""
        found = [r for r in (self._clustered, self._tested, self.history.last) if r]
        return sorted(found, key=lambda record: int(record["round"]))


class Feed:
    """Hands the state from the daemon's loop to the threads of the page.

    Args:
        fleet: its name.
        directory: the aggregator's.
        directory_of: returns the directory of a run by its number.
        clock: returns unix seconds.
    """

    def __init__(
        self, fleet: str, directory: Path, directory_of: Callable[[int], Path], clock: Callable[[], float] = time.time
    ) -> None:
        self.fleet = fleet
        self._directory, self._directory_of, self._clock = directory, directory_of, clock
        self._published: tuple[Facts, RunPlan | None] | None = None
        self._lock = threading.Lock()
        self._stored: _StoredHistory | None = None
        self._earlier: tuple[Mapping[str, Any], ...] | None = None
        self._snapshot: Snapshot | None = None
        self._built_s = 0.0

    def publish(self, facts: Facts, plan: RunPlan | None) -> None:
        """Replace the facts; for the daemon's loop, which never waits here.

        Args:
            facts: all but the run's stored rounds and the free space, which `current` reads.
            plan: of the run that is served; None if none is.
        """
        self._published = facts, plan

    @property
    def not_ready(self) -> str:
        """Why the aggregator can't serve its fleet now; empty if it can."""
        live = None if self._published is None else self._published[0].live
        if live is None:
            return "the aggregator has just started"
        if self._clock() - live.alive_at_s > SILENT_S:
            return "no sign of life from the aggregator's loop"
        return "" if live.connection.connected else "not connected to the broker"

    def current(self) -> Snapshot | None:
        """Return the state, at most UPDATE_S old; None before the first `publish`."""
        with self._lock:
            if self._snapshot is None or time.monotonic() - self._built_s >= UPDATE_S:
                published = self._published
                if published is not None:
                    self._snapshot = self._built(*published)
                    self._built_s = time.monotonic()
            return self._snapshot

    def _built(self, facts: Facts, plan: RunPlan | None) -> Snapshot:
        before = self._snapshot
        changed, trouble = self._follow(plan)
        stored = self._stored
        free = free_bytes_of(self._directory)
        now_s = int(self._clock())
        run = None if stored is None else stored_run(stored.plan, stored.newest())
        status = build(dataclasses.replace(facts, run=run, disk_free_bytes=free, now_s=now_s))
        text = _json(status.document())
        runs, runs_text = ((), "[]") if before is None else (before.runs, before.runs_text)
        if changed or before is None:
            runs = () if stored is None else (stored.history.document(),)
            runs_text = _json(runs)
        return Snapshot(
            status=status,
            runs=runs,
            totals=None if stored is None else dataclasses.replace(stored.history.totals),
            last={} if stored is None else stored.history.last,
            clusters={} if stored is None else dict(stored.history.sizes),
            disk_free_bytes=free,
            made_at_s=now_s,
            status_text=text,
            runs_text=runs_text,
            status_serial=_serial(before, text, "status"),
            runs_serial=_serial(before, runs_text, "runs"),
            trouble=trouble,
            expires=facts.expires,
            earlier=self._earlier or (),
        )

    def _follow(self, plan: RunPlan | None) -> tuple[bool, str]:
        """Read the rounds that have closed; return whether the history changed, and why it can't be read."""
        changed = (None if self._stored is None else self._stored.plan) != plan
        if changed:
            self._stored = None if plan is None else _StoredHistory(plan, self._directory_of(plan.run))
        if changed or self._earlier is None:
            self._earlier = tuple(self._read_earlier(None if plan is None else plan.run))
        if self._stored is None:
            return changed, ""
        try:
            return self._stored.follow() or changed, ""
        except (ShoalError, sqlite3.Error, OSError) as error:  # a disk that fails: the daemon itself decides what to do
            return changed, reason_of(error)

    def _read_earlier(self, served: int | None) -> Iterator[Mapping[str, Any]]:
        """Yield the histories of the newest runs besides the served one that fit the page; an unreadable one is left out."""
        places = sorted(self._directory.glob("run-*"), reverse=True)
        for place in itertools.islice(places, MOST_RUNS):
            try:
                data = read_plan(place)
                stored = None if data is None else _StoredHistory(decode(data, RunPlan), place)
                if stored is not None and stored.plan.run != served and stored.follow():
                    yield stored.history.document()
            except (ShoalError, sqlite3.Error, OSError) as error:
                LOG.debug("a run is not on the page", extra={"kv": {"run": place.name, "reason": reason_of(error)}})


def _serial(before: Snapshot | None, text: str, name: str) -> int:
    if before is None:
        return 0
    serial: int = getattr(before, f"{name}_serial")
    return serial if getattr(before, f"{name}_text") == text else serial + 1


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
