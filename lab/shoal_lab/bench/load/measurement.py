"""One run of `shoal bench load`: start the programs, watch them round by round, and measure their use of CPU and memory."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final, Literal

from aggregator.storage.store import read_records, uploads_stored
from shoal.errors import UsageError
from shoal.simulation.process_fleet import StageError
from shoal.util.console import counted
from shoal_lab.bench.load import soak
from shoal_lab.bench.load.fleet_load import STALLED_S, LoadFleet
from shoal_lab.bench.load.replay import prepare

Fault = Literal["aggregator", "broker"]
Rows = Sequence[Mapping[str, Any]]

WARM_UP_ROUNDS: Final = 1
"""Rounds at the start that medians leave out: in the first one the run's package and the models travel for the first time."""
GROWTH_ROUNDS: Final = 20
"""Training rounds from which on the figures tell whether memory, files, database and CPU stay flat."""
GROWTH_SAMPLES: Final = 60
SAMPLE_EVERY_S: Final = 0.05
FAULT_SAMPLE_EVERY_S: Final = 0.005
DOWN_S: Final = 1.0
"""Time that a killed process stays away."""


def measure(devices: int, *, prepared: bool = False, fault: Fault | None = None, **options: Any) -> dict[str, Any]:
    """Run the bench once.

    Args:
        devices: size of the fleet.
        prepared: seal all uploads first and replay them from one process (`shoal_lab.bench.load.replay`).
        fault: process to kill with SIGKILL in the middle of a round, once, and to start again; needs some ``spread_s``, so that
            there is a middle.
        options: see `LoadFleet`.

    Raises:
        StageError: a process ended by itself, or the run stalled.
        ConfigError: this process may not open enough files for so many devices.
    """
    if options.get("shards", 1) > 1 and fault is not None:
        raise UsageError("a fault strikes the one process of an aggregator without workers", hint="use one shard")
    with LoadFleet(devices=devices, **options) as fleet:
        start = prepare(fleet) if prepared else fleet.start_drivers
        fleet.start_aggregator()
        start()
        samples = list(watch(fleet, fault))
        reports = fleet.reports()
        return figures(fleet, read_records(fleet.run_dir), samples, reports)


def watch(fleet: LoadFleet, fault: Fault | None = None) -> Iterator[dict[str, Any]]:
    """Yield samples until the run has ended.

    Raises:
        StageError: a process ended by itself, no round closed for STALLED_S, or the run ended before the fault.
    """
    begin_s = time.monotonic()
    changed_s, before = 0.0, (-1, -1)
    while True:
        sample = fleet.sample(time.monotonic() - begin_s)
        yield sample
        if sample["closed"] > fleet.rounds:
            if fault is not None:
                raise StageError(
                    "the run ended before there was a middle to kill a process in", hint="use more devices"
                )
            return
        # Stored uploads count as progress, since a round of a large fleet may take longer than STALLED_S.
        now = (sample["closed"], uploads_stored(fleet.run_dir, sample["closed"] + 1))
        if fleet.churn and sample["closed"] > max(0, before[0]):
            fleet.signal_drivers(signal.SIGUSR1)
        if now != before:
            changed_s, before = sample["at_s"], now
        elif sample["at_s"] - changed_s > STALLED_S:
            raise StageError(
                f"nothing happened for {STALLED_S:g} s in round {now[0] + 1}, of which {now[1]} of {fleet.size} uploads "
                f"are stored\n{fleet.programs['aggregator'].tail()}"
            )
        if fault is not None and sample["closed"] >= WARM_UP_ROUNDS and 0 < now[1] < fleet.size:
            strike(fleet, fault)
            fault = None
        time.sleep(SAMPLE_EVERY_S if fault is None else FAULT_SAMPLE_EVERY_S)


def strike(fleet: LoadFleet, fault: Fault) -> None:
    """Kill the aggregator or the broker with SIGKILL and start it again after DOWN_S."""
    if fault == "aggregator":
        fleet.stop("aggregator", signal.SIGKILL)
        time.sleep(DOWN_S)
        fleet.start_aggregator()
    else:
        fleet.broker.kill()
        time.sleep(DOWN_S)
        fleet.broker.start()


def of_rounds(samples: Rows, rounds: int) -> list[Mapping[str, Any]]:
    """Return the first sample after each of the training rounds that follow the warm-up, thinned to GROWTH_SAMPLES at most."""
    found = {s["closed"]: s for s in reversed(samples) if WARM_UP_ROUNDS <= s["closed"] <= rounds}
    chosen = [found[closed] for closed in sorted(found, reverse=True)]
    return chosen[:: math.ceil(len(chosen) / GROWTH_SAMPLES)][::-1]


def figures(fleet: LoadFleet, records: Rows, samples: Rows, reports: Rows) -> dict[str, Any]:
    """Return the figures of a run that has ended.

    CPU is that of the training rounds after the warm-up, by the processes' own counts; ``seconds_per_round_median`` is by the
    aggregator's records. ``others_cpu_share`` is the part of all CPU that broker and devices took. Figures of churn are the
    uploads counted in the smallest round, and those left out since they were trained from another state than most. ``growth``
    compares the first and the last third of a run of GROWTH_ROUNDS or more, as a soak does.
    """
    first = min(WARM_UP_ROUNDS, fleet.rounds - 1)
    begin = next(s for s in samples if s["closed"] >= first)
    end = next(s for s in samples if s["closed"] >= fleet.rounds)
    measured = [r for r in records if first < r["round"] <= fleet.rounds]
    uploads = sum(r["contributed"] for r in measured)

    def spent(name: str) -> float:
        # A process that was killed and started again counts its CPU time from 0.
        return max(0.0, float(end[name] - begin[name]))

    shards_s = [max(0.0, b - a) for a, b in zip(begin["shard_cpu_s"], end["shard_cpu_s"], strict=True)]
    others_s, ours_s = spent("broker_cpu_s") + spent("drivers_cpu_s"), spent("aggregator_cpu_s") + sum(shards_s)
    spans_s = [s for report in reports for s in report.get("spans_s", [])[first : fleet.rounds]]
    churn = {
        "churn": fleet.churn,
        "uploads_fewest": min(r["contributed"] for r in records),
        "out_of_step": sum(len(r["out_of_step"]) for r in records),
    }
    keeper = {
        "keeper_cpu_s_per_round": spent("keeper_cpu_s") / len(measured),
        "keeper_rss_mb_max": max(s["keeper_rss_mb_max"] for s in samples),
    }
    return {
        "devices": fleet.size,
        "model_bytes": fleet.model_bytes,
        "algorithm": fleet.algorithm,
        "rounds": fleet.rounds,
        "seconds_per_round_median": median(r["seconds"] for r in measured),
        "aggregator_cpu_ms_per_upload": 1e3 * spent("aggregator_cpu_s") / uploads,
        "main_thread_cpu_ms_per_upload": 1e3 * spent("main_cpu_s") / uploads,
        "others_cpu_share": others_s / max(others_s + ours_s, 1e-9),
        **({"uploads_per_s_median": fleet.size / median(spans_s)} if spans_s else {}),
        "broker_cpu_s_per_round": spent("broker_cpu_s") / len(measured),
        "aggregator_rss_mb_max": max(s["rss_mb_max"] for s in samples),
        "open_files_max": max(s["open_files"] for s in samples),
        "uploads_expected": sum(r["ordered"] for r in records),
        "uploads_counted": sum(r["contributed"] for r in records),
        "nacks": sum(r["nacks"] for r in reports),
        "reminders": sum(r["reminders"] for r in reports),
        **(churn if fleet.churn else {}),
        **(keeper if fleet.keeper else {}),
        **({"growth": soak.figures(of_rounds(samples, fleet.rounds))} if fleet.rounds >= GROWTH_ROUNDS else {}),
        "shards": fleet.shards,
        "shard_rss_mb_max": max(s["shard_rss_mb_max"] for s in samples),
        "shards_cpu_ms_per_upload": 1e3 * sum(shards_s) / uploads,
        "shard_cpu_ms_per_upload_max": 1e3 * max(shards_s, default=0.0) / uploads,
        # What the CPU of the busiest process allows if each has a core for itself, as on machines of their own.
        "uploads_per_s_by_cpu": uploads / max(spent("aggregator_cpu_s"), *shards_s, 1e-9),
        "core_each": fleet.core_each,
        "coordinator_vector_bytes": max(s["coordinator_vector_bytes"] for s in samples),
    }


def words(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as text."""
    lines = [
        f"{counted(data['devices'], 'device')}, {data['algorithm']}, model of {data['model_bytes']} bytes, "
        f"{counted(data['rounds'], 'round')}: {data['seconds_per_round_median']:.3f} s a round (median)",
        f"aggregator: {data['aggregator_cpu_ms_per_upload']:.2f} ms of CPU an upload, peak {data['aggregator_rss_mb_max']:.0f} "
        f"MB, {data['open_files_max']} open files; broker: {data['broker_cpu_s_per_round']:.3f} s of CPU a round",
        f"its main thread: {data['main_thread_cpu_ms_per_upload']:.2f} ms of CPU an upload; broker and devices took "
        f"{100 * data['others_cpu_share']:.0f} % of all CPU time",
        f"uploads: {data['uploads_counted']} counted of {data['uploads_expected']}; "
        f"{counted(data['nacks'], 'NACK')}, {counted(data['reminders'], 'reminder')}",
    ]
    if "uploads_per_s_median" in data:
        lines.insert(
            3, f"{data['uploads_per_s_median']:.0f} uploads a second from the first one to the last answer (median)"
        )
    if "keeper_rss_mb_max" in data:
        keeper_s, keeper_mb = data["keeper_cpu_s_per_round"], data["keeper_rss_mb_max"]
        lines.append(f"keeper: {keeper_s:.3f} s of CPU a round, peak {keeper_mb:.0f} MB")
    if data.get("churn"):
        lines.append(
            f"{100 * data['churn']:g} % of the devices left after each round: {data['uploads_fewest']} uploads in the smallest "
            f"round, {data['out_of_step']} out of step"
        )
    return lines + (soak.thirds(data["growth"]) if "growth" in data else [])
