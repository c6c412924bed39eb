"""The record of a fleet's state as lines for people."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sized
from typing import Final

from aggregator.rounds.standstill import NAMES_SHOWN, named
from aggregator.rounds.state import WORDS, Order, RunPhase
from aggregator.status.facts import DeviceStatus, LiveFacts, RunStatus
from aggregator.status.record import REVOKED, FleetStatus, by_label
from aggregator.status.versions import NEWER, OLDER, OTHER
from shoal.limits import CHUNK_BYTES
from shoal.protocol.documents import SHOWN
from shoal.protocol.messages import Vitals
from shoal.util.console import counted, second, span

KILO: Final = 1000


def state_words(status: FleetStatus) -> str:
    """Return whether the aggregator runs and is connected, and since when."""
    since = "" if status.since_s is None else f" since {second(status.since_s)}"
    if not status.running:
        return f"not running{since}"
    small = f", chunks of {status.chunk_bytes} bytes" if status.chunk_bytes < CHUNK_BYTES else ""
    return f"running, {'' if status.connected else 'not '}connected to {status.broker}{since}{small}"


def problem_lines(status: FleetStatus) -> list[str]:
    """Return the problems with their advice."""
    return [line for p in status.problems for line in (f"problem: {p.reason}", f"  hint: {p.advice}")]


def shown(device: DeviceStatus) -> str:
    """Return the name that people see, and in brackets the device's own if that is another."""
    return f"{device.labels[SHOWN]} ({device.name})" if SHOWN in device.labels else device.name


def device_lines(status: FleetStatus) -> list[str]:
    """Return how many devices are online, how far their accuracies are apart, and those that can't take part, if known."""
    devices = [d for d in status.devices if d.reason != REVOKED]
    known = [d for d in devices if d.online is not None]
    paused = f"; {status.run.order}" if status.run is not None and status.run.order == WORDS[Order.PAUSE] else ""
    lines = [f"devices: {sum(bool(d.online) for d in known)} of {len(devices)} online{paused}"] if known else []
    labels = list(by_label(known).items())
    lines += [
        f"  {label}: {sum(bool(d.online) for d in same)} of {len(same)} online" for label, same in labels[:NAMES_SHOWN]
    ]
    lines += _more(labels, " labels")
    tested = sorted((d.accuracy, shown(d)) for d in devices if d.accuracy is not None)
    if len(tested) > 1:
        (least, name), (most, _) = tested[0], tested[-1]
        apart = 100 * statistics.stdev(accuracy for accuracy, _ in tested)
        lines.append(
            f"accuracy of single devices: {least:.1%} ({name}) to {most:.1%}, standard deviation {apart:.1f} points"
        )
    impaired = [d for d in devices if d.reason]
    for device in impaired[:NAMES_SHOWN]:
        lines += [f"  {shown(device)}: {device.reason}{_since(device)}", f"    hint: {device.advice}"]
    lines += _more(impaired)
    revoked = [shown(d) for d in status.devices if d.reason == REVOKED]
    partial = [d for d in devices if d.left_out]
    lines += [f"  {shown(d)} leaves out {counted(d.left_out, 'damaged sample')}" for d in partial[:NAMES_SHOWN]]
    lines += ["    hint: `shoal-edge status DIR` there names the first"] if partial else []
    lines += _more(partial, " leave out some")
    reporting = [d for d in devices if d.vitals is not None]
    lines += [
        f"  {shown(d)} reports {vitals_words(d.vitals, d.vitals_at_s)}" for d in reporting[:NAMES_SHOWN] if d.vitals
    ]
    lines += _more(reporting, " report their condition")
    return [*lines, *([f"revoked: {named(revoked)}"] if revoked else [])]


def _more(found: Sized, words: str = "") -> list[str]:
    left = len(found) - NAMES_SHOWN
    return [f"  and {left} more{words}: --json lists all"] if left > 0 else []


def cluster_lines(status: FleetStatus) -> list[str]:
    """Return a line for each of the run's first clusters, with its devices; none for a single cluster."""
    clusters = () if status.run is None else status.run.clusters
    called = {device.name: shown(device) for device in status.devices}
    lines = []
    for cluster in clusters[:NAMES_SHOWN] if len(clusters) > 1 else ():
        fit = "" if cluster.accuracy is None else f" ({100 * cluster.accuracy:.1f}%)"
        lines.append(f"  cluster {cluster.id}{fit}: {named([called.get(name, name) for name in cluster.members])}")
    return lines


def worker_lines(status: FleetStatus) -> list[str]:
    """Return how many workers or keepers are online, and a line for each; empty without them."""
    if not status.workers:
        return []
    online = sum(bool(w.online) for w in status.workers)
    lines = [f"{status.workers[0].role}s: {online} of {len(status.workers)} online"]
    for worker in status.workers:
        state = "unknown" if worker.online is None else "online" if worker.online else "offline"
        report = "no report yet" if worker.last_report_s is None else f"last report {second(worker.last_report_s)}"
        waits = f"; the round waits for {worker.waits_for}" if worker.waits_for else ""
        lines.append(f"  {worker.name}: {state}, {report}{waits}")
    return lines


def version_lines(status: FleetStatus) -> list[str]:
    """Return the versions of aggregator and devices, then the devices of another version than the aggregator's, with advice."""
    devices = [d for d in status.devices if d.reason != REVOKED and d.version]
    if not devices:
        return [f"versions: aggregator {status.version}"] if status.version else []
    counts = Counter(d.version for d in devices)
    words = ", ".join(f"{counted(count, 'device')} {version}" for version, count in sorted(counts.items()))
    lines = [f"versions: aggregator {status.version}, {words}"]
    for state in (OLDER, NEWER, OTHER):
        found = [d for d in devices if d.version_state == state]
        if found:
            lines += [
                f"  {state}: {named([f'{d.name} ({d.version})' for d in found])}",
                f"    hint: {found[0].version_advice}",
            ]
    return lines


def vitals_words(vitals: Vitals, at_s: int | None) -> str:
    """Return the condition of a device at a time as one line; figures that it can't measure are left out."""
    cores = "" if vitals.cores is None else f" on {counted(vitals.cores, 'core')}"
    whole = "" if vitals.memory_bytes is None else f" of {_size(vitals.memory_bytes)}"
    charging = ", charging or full" if vitals.charging else ""
    parts = [
        "" if vitals.disk_free_bytes is None else f"disk {_size(vitals.disk_free_bytes)} free",
        "" if vitals.memory_free_bytes is None else f"memory {_size(vitals.memory_free_bytes)}{whole} free",
        "" if vitals.load is None else f"load {vitals.load:.2g}{cores}",
        "" if vitals.temperature_c is None else f"{vitals.temperature_c:.0f} °C",
        "" if vitals.battery_percent is None else f"battery {vitals.battery_percent} %{charging}",
        "" if vitals.uptime_s is None else f"up {span(vitals.uptime_s)}",
    ]
    return f"{', '.join(part for part in parts if part) or 'no figure'} ({second(at_s or 0)})"


def _size(size_bytes: int) -> str:
    """Return a size in the largest unit of which it has at least one: 1.2 GB."""
    size, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= KILO and len(units) > 1:
        size /= KILO
        units = units[1:]
    return f"{size:.3g} {units[0]}"


def _since(device: DeviceStatus) -> str:
    since = f" since {second(device.since_s)}" if device.online is False and device.since_s is not None else ""
    upload = f", last upload {second(device.last_upload_s)}" if device.last_upload_s is not None else ""
    return f"{since}{upload}"


def service_line(facts: LiveFacts) -> str:
    """Return what the running daemon does now, as one line for `systemctl status`."""
    connection, run = facts.connection, facts.run
    if not connection.connected:
        return f"not connected to {connection.broker}"
    if run is None or run.phase == RunPhase.FINISHED.value:
        return "idle: waiting for a run"
    order = f", {run.order}" if run.order else ""
    if run.phase == RunPhase.GATHERING.value:
        return f"run {run.run}: {run.received} devices online, {run.quorum} needed{order}"
    return f"run {run.run}, round {run.round}: {run.received} uploads, {run.quorum} needed{order}"


def round_line(run: RunStatus) -> str:
    """Return where a run is; empty if it is not served."""
    if run.since_s is None or run.phase == RunPhase.FINISHED.value:
        return ""
    if run.phase == RunPhase.GATHERING.value and run.order == WORDS[Order.PAUSE]:
        return f"run {run.run} now: {run.order} after round {run.round}, since {second(run.since_s)}"
    if run.phase == RunPhase.GATHERING.value:
        place = f"gathering: {run.received} devices online, {run.quorum} needed"
    elif run.computing:
        return f"run {run.run} now: round {run.round}: {run.received} uploads, computing; the round began {second(run.since_s)}"
    else:
        place = f"round {run.round}: {run.received} uploads, {run.quorum} needed"
    deadline = ""
    if run.deadline_at_s is not None:
        deadline = f", deadline {'passed at ' if run.deadline_passed else ''}{second(run.deadline_at_s)}"
    missing = f"; waiting for {named([m.device for m in run.missing])}" if run.missing else ""
    ends = f"; {run.order} after this round" if run.order and run.phase == RunPhase.ROUND.value else ""
    return f"run {run.run} now: {place}, since {second(run.since_s)}{deadline}{missing}{ends}"


def run_words(run: RunStatus) -> str:
    """Return a line about the run in any phase."""
    line = round_line(run)
    if line:
        return line
    order = f", {run.order}" if run.order else ""
    round_ = min(run.round, run.rounds)  # the final round has a number beyond the last
    return f"run {run.run}: {run.algorithm}, {run.phase.replace('_', ' ')}{order}, round {round_} of {run.rounds}"
