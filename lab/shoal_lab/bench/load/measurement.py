"""One run of `shoal bench load`: start the programs, watch them round by round, and measure their use of CPU and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal

from aggregator.storage.run_status import read_records, read_waiting, uploads_stored
from shoal.errors import UsageError
from shoal.simulation.process_fleet import StageError
from shoal.transport.local_broker import free_port
from shoal_lab.bench.load.driver import DriverReport
from shoal_lab.bench.load.fleet_load import STALLED_S, LoadFleet, Model, Sample
from shoal_lab.bench.load.page_reader import PageReader
from shoal_lab.bench.load.replay import prepare

Fault = Literal["aggregator", "broker"]

WARM_UP_ROUNDS: Final = 1
"""Rounds at the start that medians leave out: in the first one the run's package and the models travel for the first time."""
SAMPLE_EVERY_S: Final = 0.05
FAULT_SAMPLE_EVERY_S: Final = 0.005
DOWN_S: Final = 1.0
"""Time that a killed process stays away."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Result of one run of the bench; ``data`` names the fields as `--json` prints them.

    Attributes:
        seconds: of each training round after the warm-up, by the aggregator's records.
        aggregator_cpu_s: CPU seconds of the aggregator in those rounds.
        broker_cpu_s: CPU seconds of the broker in those rounds.
        uploads_measured: uploads in those rounds.
        drivers_cpu_s: CPU seconds of all driver processes from start to end.
        main_cpu_s: CPU seconds of the aggregator's main thread in those rounds.
        measured_drivers_cpu_s: CPU seconds of all driver processes in those rounds.
        spans_s: of each of those rounds, from the first upload that was published to the last answer; `--prepared` only.
        churn: share of the devices that left after each round, and were back after the next.
        uploads_fewest: uploads counted in the round that counted the fewest.
        out_of_step: uploads left out since they were trained from another state than most.
        shards: workers of the aggregator; 1 is an aggregator without workers.
        shard_rss_mb_max: peak memory of the largest worker, MB of 2^20 bytes.
        shard_cpu_s: CPU seconds of each worker in the measured rounds.
        core_each: whether each process of the aggregator was bound to one core.
        coordinator_vector_bytes: most bytes of updates and means that the aggregator's own process has stored.
    """

    devices: int
    model_bytes: int
    algorithm: str
    rounds: int
    seconds: tuple[float, ...]
    aggregator_cpu_s: float
    broker_cpu_s: float
    uploads_measured: int
    aggregator_rss_mb_max: float
    open_files_max: int
    uploads_expected: int
    uploads_counted: int
    nacks: int
    reminders: int
    drivers_cpu_s: float
    churn: float = 0.0
    uploads_fewest: int = 0
    out_of_step: int = 0
    main_cpu_s: float = 0.0
    measured_drivers_cpu_s: float = 0.0
    spans_s: tuple[float, ...] = ()
    shards: int = 1
    shard_rss_mb_max: float = 0.0
    shard_cpu_s: tuple[float, ...] = ()
    core_each: bool = False
    coordinator_vector_bytes: int = 0

    def data(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        churn = {"churn": self.churn, "uploads_fewest": self.uploads_fewest, "out_of_step": self.out_of_step}
        others_s = self.broker_cpu_s + self.measured_drivers_cpu_s
        ours_s = self.aggregator_cpu_s + sum(self.shard_cpu_s)
        speed = {"uploads_per_s_median": self.devices / median(self.spans_s)} if self.spans_s else {}
        busiest_s = max((self.aggregator_cpu_s, *self.shard_cpu_s))
        return {
            "devices": self.devices,
            "model_bytes": self.model_bytes,
            "algorithm": self.algorithm,
            "rounds": self.rounds,
            "seconds_per_round_median": median(self.seconds),
            "aggregator_cpu_ms_per_upload": 1e3 * self.aggregator_cpu_s / self.uploads_measured,
            "main_thread_cpu_ms_per_upload": 1e3 * self.main_cpu_s / self.uploads_measured,
            "others_cpu_share": others_s / max(others_s + ours_s, 1e-9),
            **speed,
            "broker_cpu_s_per_round": self.broker_cpu_s / len(self.seconds),
            "aggregator_rss_mb_max": self.aggregator_rss_mb_max,
            "open_files_max": self.open_files_max,
            "uploads_expected": self.uploads_expected,
            "uploads_counted": self.uploads_counted,
            "nacks": self.nacks,
            "reminders": self.reminders,
            **(churn if self.churn else {}),
            "shards": self.shards,
            "shard_rss_mb_max": self.shard_rss_mb_max,
            "shards_cpu_ms_per_upload": 1e3 * sum(self.shard_cpu_s) / self.uploads_measured,
            "shard_cpu_ms_per_upload_max": 1e3 * max(self.shard_cpu_s, default=0.0) / self.uploads_measured,
            # What the CPU of the busiest process allows if each has a core for itself, as on machines of their own.
            "uploads_per_s_by_cpu": self.uploads_measured / max(busiest_s, 1e-9),
            "core_each": self.core_each,
            "coordinator_vector_bytes": self.coordinator_vector_bytes,
        }


def measure(
    devices: int,
    *,
    model: Model = "logistic",
    algorithm: str = "fedavg",
    rounds: int = 5,
    open_files: int = 1024,
    prepared: bool = False,
    fault: Fault | None = None,
    spread_s: float = 0.0,
    churn: float = 0.0,
    page: bool = False,
    shards: int = 1,
    core_each: bool = False,
) -> LoadFigures:
    """Run the bench once.

    Args:
        devices: size of the fleet.
        model: logistic (31,400 bytes) or mlp (636,040 bytes).
        algorithm: of the run.
        rounds: training rounds.
        open_files: soft and hard limit on the aggregator's open files.
        prepared: seal all uploads first and replay them from one process (`shoal_lab.bench.load.replay`).
        fault: process to kill with SIGKILL in the middle of a round, once, and to start again.
        spread_s: see `DriverSpec`; a fault needs some, so that there is a middle.
        churn: share of the devices that leave after each round; they are back after the next one.
        shards: workers of the aggregator; 1 is an aggregator without workers.
        core_each: see `LoadFleet`.
        page: serve the fleet page, to one open page and one Prometheus (`shoal_lab.bench.load.page_reader`).

    Raises:
        StageError: a process ended by itself, or the run stalled.
        ConfigError: this process may not open enough files for so many devices.
    """
    port = free_port() if page else 0
    if shards > 1 and fault is not None:
        raise UsageError("a fault strikes the one process of an aggregator without workers", hint="use one shard")
    with (
        LoadFleet(
            devices=devices,
            model=model,
            algorithm=algorithm,
            rounds=rounds,
            open_files=open_files,
            spread_s=spread_s,
            churn=churn,
            page_port=port,
            shards=shards,
            core_each=core_each,
        ) as fleet,
        PageReader(port) if page else contextlib.nullcontext(),
    ):
        if prepared:
            replay = prepare(fleet)
            fleet.start_aggregator()
            replay()
        else:
            fleet.start_aggregator()
            fleet.start_drivers()
        samples = list(watch(fleet, fault))
        reports = fleet.reports()
        records = read_records(fleet.run_dir)
        return figures(fleet, records, samples, reports)


def watch(fleet: LoadFleet, fault: Fault | None = None) -> Iterator[Sample]:
    """Yield samples until the run has ended.

    Raises:
        StageError: a process ended by itself, no round closed for STALLED_S, or the run ended before the fault.
    """
    changed_s, before = time.monotonic(), (-1, -1)
    while True:
        sample = fleet.sample(time.monotonic())
        yield sample
        if sample.closed > fleet.rounds:
            if fault is not None:
                raise StageError(
                    "the run ended before there was a middle to kill a process in", hint="use more devices"
                )
            return
        # Stored uploads count as progress, since a round of a large fleet may take longer than STALLED_S.
        now = (sample.closed, uploads_stored(fleet.run_dir, sample.closed + 1))
        if fleet.churn and sample.closed > max(0, before[0]):
            fleet.let_devices_leave()
        if now != before:
            changed_s, before = sample.at_s, now
        elif sample.at_s - changed_s > STALLED_S:
            raise StageError(
                f"nothing happened for {STALLED_S:g} s in round {now[0] + 1}, of which {now[1]} of {fleet.devices} uploads "
                f"are stored: {read_waiting(fleet.run_dir)}\n{fleet.aggregator.tail()}"
            )
        if fault is not None and sample.closed >= WARM_UP_ROUNDS and 0 < now[1] < fleet.devices:
            strike(fleet, fault)
            fault = None
        time.sleep(SAMPLE_EVERY_S if fault is None else FAULT_SAMPLE_EVERY_S)


def strike(fleet: LoadFleet, fault: Fault) -> None:
    """Kill the aggregator or the broker with SIGKILL and start it again after DOWN_S."""
    if fault == "aggregator":
        fleet.kill_aggregator()
        time.sleep(DOWN_S)
        fleet.start_aggregator()
    else:
        fleet.broker.kill()
        time.sleep(DOWN_S)
        fleet.broker.start()


def figures(
    fleet: LoadFleet, records: list[dict[str, Any]], samples: list[Sample], reports: list[DriverReport]
) -> LoadFigures:
    """Return the figures of a run that has ended."""
    first = min(WARM_UP_ROUNDS, fleet.rounds - 1)
    begin = next(s for s in samples if s.closed >= first)
    end = next(s for s in samples if s.closed >= fleet.rounds)
    measured = [r for r in records if first < r["round"] <= fleet.rounds]
    return LoadFigures(
        devices=fleet.devices,
        model_bytes=fleet.model_bytes,
        algorithm=fleet.algorithm,
        rounds=fleet.rounds,
        seconds=tuple(r["seconds"] for r in measured),
        # A process that was killed and started again counts its CPU time from 0.
        aggregator_cpu_s=max(0.0, end.aggregator_cpu_s - begin.aggregator_cpu_s),
        broker_cpu_s=max(0.0, end.broker_cpu_s - begin.broker_cpu_s),
        uploads_measured=sum(r["contributed"] for r in measured),
        aggregator_rss_mb_max=max(s.rss_mb_max for s in samples),
        open_files_max=max(s.open_files for s in samples),
        uploads_expected=sum(r["ordered"] for r in records),
        uploads_counted=sum(r["contributed"] for r in records),
        nacks=sum(r.nacks for r in reports),
        reminders=sum(r.reminders for r in reports),
        drivers_cpu_s=sum(r.cpu_s for r in reports),
        churn=fleet.churn,
        uploads_fewest=min(r["contributed"] for r in records),
        out_of_step=sum(len(r["out_of_step"]) for r in records),
        main_cpu_s=max(0.0, end.main_cpu_s - begin.main_cpu_s),
        measured_drivers_cpu_s=max(0.0, end.drivers_cpu_s - begin.drivers_cpu_s),
        shards=fleet.shards,
        shard_rss_mb_max=max(s.shard_rss_mb_max for s in samples),
        shard_cpu_s=tuple(max(0.0, b - a) for a, b in zip(begin.shard_cpu_s, end.shard_cpu_s, strict=True)),
        core_each=fleet.core_each,
        coordinator_vector_bytes=max(s.coordinator_vector_bytes for s in samples),
        spans_s=tuple(s for report in reports for s in report.spans_s[first : fleet.rounds]),
    )
