"""Log lines about a run: the devices that it waits for, and the results of each round.

A new waiting line is logged within 3 s; an unchanged one is repeated after pauses that double up to 60 s. Each device
whose weight was capped or whose update was left out is named once. Example of a line: ``round 4: 3 of 5, waiting for
dev-2, dev-7``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from aggregator.rounds.quorum_and_deadline import FLEET_TOO_SMALL, Shortage, is_paused, members, shortage
from aggregator.rounds.standstill import ROUNDS_APART, STANDS_STILL, named
from aggregator.rounds.state import NOT_WAITED_FOR, WORDS, EngineState, RoundRecord
from aggregator.strategies.base import STANDS_APART
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import DeclineReason
from shoal.util.console import second

LOG = logging.getLogger("shoal.aggregator")
STATUS_AFTER_S: Final = 3.0
"""Time from the opening of a round to the first line about missing devices, and between two checks."""
MOST_PAUSE_S: Final = 60.0
"""Longest pause before an unchanged line is repeated."""

BROKER_LOST: Final = "waiting for the broker: the connection is lost"
CAPPED_HINT: Final = (
    "check the sample counts that these devices report; shoal-fleet run start --weight-cap N sets the limit, and 0 removes "
    "it"
)
REFUSED_NORM_HINT: Final = (
    "check these devices and their data (scale, labels; far more samples than the others mean more steps and a longer "
    "update: --local epochs=0 --local steps=N gives all the same); shoal-fleet revoke excludes one, and a smaller learning "
    "rate or --local clip shortens updates"
)
APART_HINT: Final = (
    "their weight in the mean is below a quarter: check these devices' labels and sensors; revoke one that attacks; if their "
    "data are right but rare, let cfl find their group or run with --robust off"
)
CONTRARY_HINT: Final = (
    "its data are unlike the others', or it reports false margins: in a side of five or more devices one margin decides nothing, "
    "of fewer it can refuse a split; check the device, and revoke it if it lies"
)
STANDS_APART_HINT: Final = "the log says whether an update or a margin, and what to do"
OUT_OF_STEP_HINT: Final = (
    "such a device takes a checkpoint by itself; if it happens again and again, check its disk and memory"
)
DECLINE_REASONS: Final = {
    DeclineReason.DATA: "data do not fit the task",
    DeclineReason.TASK: "training failed",
    DeclineReason.REFUSED: "refused by the device",
    DeclineReason.OTHER: "not possible on the device",
    DeclineReason.UPLOAD: "upload refused",
    DeclineReason.DISK: "disk is full or fails",
    DeclineReason.STATE: "waits for a checkpoint",
    DeclineReason.SUM: "refuses a mean that is no sum of updates",
    DeclineReason.KEYS: "waits for a round under the newer keys",
    DeclineReason.TRAINER: "its own training code is missing, another, or fails",
    DeclineReason.METERED: "its link is metered at this time of day",
}
WARNED_OF: Final = frozenset({STANDS_STILL, FLEET_TOO_SMALL, NOT_WAITED_FOR})
"""Kinds of events that are logged as warnings."""


class RunLog:
    """Logs the progress of one run.

    Args:
        run: the owner's run plan.
        clock: returns unix seconds.

    Attributes:
        line: the last waiting line; empty when the run no longer waits.
        figures: the shortage that it names, as JSON has it; empty before the deadline has passed.
    """

    def __init__(self, run: RunPlan, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock
        self.line = ""
        self.figures: dict[str, Any] = {}
        self._off_since: dict[str, str] = {}
        self._opened_at = self._deadline_passed = ""
        self._asked_s = self._again_s = self._pause_s = 0.0
        self._declined: dict[str, str] = {}
        self._capped: set[str] = set()
        self._too_long: set[str] = set()
        self._apart: set[str] = set()

    def opened(self, now_s: float) -> None:
        """Record that a round has opened."""
        self._go_on()
        self._asked_s, self._opened_at = now_s, self._now()

    def came(self, device: str) -> None:
        """Record that a device is online."""
        self._off_since.pop(device, None)

    def left(self, device: str) -> None:
        """Record that a device is offline."""
        self._off_since.setdefault(device, self._now())

    def _now(self) -> str:
        return second(int(self._clock()))

    def _go_on(self) -> None:
        self.line, self.figures, self._deadline_passed = "", {}, ""

    def _missing_since(self, device: str, state: EngineState) -> str:
        """Return when a device went offline, as far as is known; when the round opened if it is online and has not uploaded."""
        if device in state.online:
            return self._opened_at
        return self._off_since.setdefault(device, self._opened_at or self._now())

    def _waiting_line(self, state: EngineState, *, computing: bool) -> tuple[str, dict[str, Any]]:
        """Return the waiting line, and the same as figures if there is a shortage."""
        line, short = waiting_for(state, computing=computing), shortage(state)
        if short is None or computing:
            return line, {}
        if not short.late:
            return f"{line}; {short.reason}; {short.hint}", self._figures(short, {})
        self._deadline_passed = self._deadline_passed or self._now()
        since = {d: self._missing_since(d, state) for d in short.missing}
        passed = f"the deadline passed at {self._deadline_passed}"
        figures = self._figures(short, since)
        return f"{line}; {passed}, {short.reason}; {short.hint}", figures

    def _figures(self, short: Shortage, since: Mapping[str, str]) -> dict[str, Any]:
        """Return a shortage as JSON has it; ``since`` has a time in ISO 8601 for each missing device."""
        return {
            "missing": [{"device": d, "since": at} for d, at in since.items()],
            "deadline_passed": short.late,
            "deadline_passed_at": self._deadline_passed or None,
            "here": short.here,
            "needed": short.needed,
            "quorum": self._run.recipe.quorum,
            "min_contributors": self._run.recipe.min_contributors,
            "reason": short.reason,
            "hint": short.hint,
        }

    def waiting(
        self, state: EngineState, now_s: float, *, lost: bool = False, computing: bool = False, workers: str = ""
    ) -> None:
        """Log the waiting line, if that is due.

        Args:
            state: of the engine.
            now_s: monotonic seconds.
            lost: whether the connection to the broker is lost: then the run waits for the broker, and for no device.
            computing: whether the round is being closed.
            workers: what the run waits for at the aggregator's workers; empty if it waits for none of them.
        """
        if now_s - self._asked_s < STATUS_AFTER_S:
            return
        self._asked_s = now_s
        line, figures = (BROKER_LOST, {}) if lost else self._waiting_line(state, computing=computing)
        if workers and not lost:
            line, figures = f"round {state.round}: {workers}", {}
        if line == self.line and now_s < self._again_s:
            return
        self._pause_s = STATUS_AFTER_S if line != self.line else min(2 * self._pause_s, MOST_PAUSE_S)
        LOG.log(logging.WARNING if figures and line != self.line else logging.INFO, line)
        if line != self.line:
            self.line, self.figures = line, figures
        self._again_s = now_s + self._pause_s

    def closed(self, record: RoundRecord, seconds: float, bytes_up: int) -> None:
        """Log the result of a closed round, and warn of declines, limits and clusters whose model has stalled."""
        self._go_on()
        report(self._run.run, record, seconds, bytes_up)
        if not record.declined.items() <= self._declined.items():
            facts = {"devices": declined_by(record.declined), "hint": "shoal-edge prints the reason on the device"}
            LOG.warning("devices can't do their part", extra={"kv": facts})
        self._declined |= record.declined
        self._limited(record)

    def _limited(self, record: RoundRecord) -> None:
        """Log once for each device that its weight was capped, or that its update was left out."""
        if not record.capped.keys() <= self._capped:
            weights = {d: f"{d} ({w:g})" for d, w in record.capped.items() if d not in self._capped}
            facts = {"round": record.round, "weights": named(sorted(weights.values())), "hint": CAPPED_HINT}
            LOG.warning("sample counts far above the median of their cluster", extra={"kv": facts})
        if not record.refused_norm.keys() <= self._too_long:
            norms = {d: f"{d} ({n:.3g})" for d, n in record.refused_norm.items() if d not in self._too_long}
            facts = {"round": record.round, "norms": named(sorted(norms.values())), "hint": REFUSED_NORM_HINT}
            LOG.warning("updates left out: norm above ten times the median", extra={"kv": facts})
        if not record.out_of_step.keys() <= self._apart:
            models = {d: f"{d} (model {m})" for d, m in record.out_of_step.items() if d not in self._apart}
            facts = {"round": record.round, "devices": named(sorted(models.values())), "hint": OUT_OF_STEP_HINT}
            LOG.warning("updates left out: trained from another state than most", extra={"kv": facts})
        told = [event for event in record.events if event["kind"] == STANDS_APART]
        apart = [event["device"] for event in told if "robust" in event]
        contrary = [f"{e['device']} ({e['margin']:g}, the others {e['others']:g})" for e in told if "margin" in e]
        if contrary:
            facts = {"round": record.round, "margins": named(contrary), "hint": CONTRARY_HINT}
            LOG.warning("a margin contradicts those of all other devices of its side", extra={"kv": facts})
        if apart:
            facts = {
                "round": record.round,
                "devices": named(apart),
                "robust": self._run.recipe.robust,
                "hint": APART_HINT,
            }
            LOG.warning(
                f"updates that stand apart from their cluster's in {ROUNDS_APART} rounds in a row", extra={"kv": facts}
            )
        # A device that takes a checkpoint is in step again; if it falls out once more, that is news.
        self._apart = set(record.out_of_step)
        self._capped |= record.capped.keys()
        self._too_long |= record.refused_norm.keys()


def limited_by(
    capped: Mapping[str, int],
    refused_norm: Mapping[str, int],
    out_of_step: Mapping[str, int],
    apart: Mapping[str, int],
) -> str:
    """Return the devices that a run's limits affected, each with its number of rounds; empty if there are none.

    Args:
        capped: device -> rounds in which its weight was capped.
        refused_norm: device -> rounds in which its update was left out because of its norm.
        out_of_step: device -> rounds in which it was left out because most devices held another state of its model.
        apart: device -> rounds that named it since its updates or margins differ from all others'.
    """
    limits = (
        ("left out, norm above ten times the median", refused_norm),
        ("weight capped", capped),
        ("left out, trained from another state than most", out_of_step),
        ("stands apart from its cluster", apart),
    )
    return "; ".join(f"{words}: {_counted(found)}" for words, found in limits if found)


def _counted(rounds: Mapping[str, int]) -> str:
    return named([f"{d} (rounds: {rounds[d]})" for d in sorted(rounds)])


def cluster_sizes(clusters: Mapping[str, int]) -> list[int]:
    """Return how many devices are in each cluster, the largest first."""
    return sorted(Counter(clusters.values()).values(), reverse=True)


def too_small(clusters: Mapping[str, int], least: int) -> tuple[int, ...]:
    """Return the clusters of fewer than ``least`` devices, whose models do not change: means of so few are not published."""
    return tuple(sorted(c for c, n in Counter(clusters.values()).items() if n < least))


def awaited_keys(state: EngineState) -> str:
    """Return which half of the owner's newer secrets the run waits for between two rounds; empty if it has both."""
    if state.plan is not None or state.roster is None or state.roster.keys_since == state.newest:
        return ""
    if state.roster.keys_since > state.newest:
        return "the owner has replaced the keys, and the newer ones have not arrived yet"
    return "the owner has replaced the keys, and the roster that belongs to them has not arrived yet"


def waiting_for(state: EngineState, *, computing: bool = False) -> str:
    """Return the line that says what the run is waiting for; ``computing`` while the round is being closed."""
    if computing:
        return f"round {state.round}: {len(state.received)} of {len(state.plan.assignments) if state.plan else 0}, computing"
    keys = awaited_keys(state)
    if keys and not is_paused(state):
        return f"round {state.round}: {keys}"
    if is_paused(state):
        return f"round {state.round}: {WORDS[state.order]}"
    if state.plan is None:
        fleet = members(state)
        absent = sorted(fleet - state.online)
        return f"gathering: {len(fleet) - len(absent)} of {len(fleet)} devices are here{_names(absent)}"
    done, total = len(state.received), len(state.plan.assignments)
    what, unable = f"round {state.round}", state.unable
    named = _names([d for d in state.waiting if d not in unable]) + (f"; {declined_by(unable)}" if unable else "")
    if state.deadline_passed and not done and not unable:
        return f"{what}: none of {total} has answered; a device that refuses a round logs the reason{named}"
    ends = f"; {WORDS[state.order]} after this round" if WORDS[state.order] and not state.plan.final else ""
    return f"{what}: {done} of {total}{named}{ends}"


def declined_by(declined: Mapping[str, str]) -> str:
    """Return the devices that can't do their part, grouped by reason; empty if there are none.

    Args:
        declined: device -> lower-case name of its `DeclineReason`, as in `RoundRecord.declined`.
    """
    by = {reason: sorted(d for d, why in declined.items() if why == reason.name.lower()) for reason in DeclineReason}
    return "; ".join(f"{DECLINE_REASONS[reason]}: {named(names)}" for reason, names in by.items() if names)


def report(run: int, record: RoundRecord, seconds: float, bytes_up: int) -> None:
    """Log a closed round and its events."""
    r = record
    pairs = {
        "run": run,
        "round": r.round,
        "devices": f"{r.contributed}/{r.ordered}",
        "loss": r.loss,
        "cluster_sizes": "+".join(map(str, cluster_sizes(r.clusters))),
        "dur_s": seconds,
        "bytes": bytes_up,
    }
    if r.tested:
        pairs["accuracy"] = r.correct / r.tested
    LOG.info("round closed", extra={"kv": pairs})
    for event in r.events:
        level = logging.WARNING if event["kind"] in WARNED_OF else logging.INFO
        LOG.log(level, str(event["kind"]), extra={"kv": {k: v for k, v in event.items() if k not in ("kind",)}})


def _names(devices: list[str]) -> str:
    return f", waiting for {named(devices)}" if devices else ""
