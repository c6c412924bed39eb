"""`shoal bench soak`: one run for many minutes, to see whether the aggregator's memory, files and times stay flat.

The fleet is that of `shoal_lab.bench.load.fleet_load`, with rounds in unbroken succession; nothing waits between them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from aggregator.storage.store import DATABASE
from shoal.simulation.process_fleet import StageError
from shoal_lab.bench.load.fleet_load import STALLED_S, LoadFleet, Sample

ROUNDS: Final = 1_000_000
"""More rounds than any soak closes."""
WARM_UP_S: Final = 10.0
"""Seconds from the first closed round to the first sample, at most a tenth of the soak: caches fill in this time."""
SAMPLES: Final = 300
"""Samples of a soak at most, at equal intervals of at least a second."""
LEAST_INTERVAL_S: Final = 1.0
RISE_MOST: Final = 0.1
"""Relative difference up to which the last third counts as no higher than the first."""
SLACK: Final = {
    "rss_mb": 2.0,
    "open_files": 2.0,
    "database_bytes": 65536.0,
    "seconds_per_round": 0.005,
    "aggregator_cpu_s_per_round": 0.005,
}
"""Absolute difference that is allowed in addition, by figure."""
RECORD_BYTES: Final = 64
"""Growth of the database that is allowed for each round that closes: the run's record keeps every round, in some 35 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSample:
    """State of the aggregator at one moment; ``at_s`` in seconds since the first sample, memory in MB of 2^20 bytes."""

    at_s: float
    closed: int
    rss_mb: float
    open_files: int
    database_bytes: int
    aggregator_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakFigures:
    """Samples of a soak, at least four."""

    devices: int
    algorithm: str
    model_bytes: int
    samples: tuple[SoakSample, ...]
    nacks: int
    reminders: int

    def data(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them: the samples, and first and last third compared."""
        first, last = thirds(self.samples)
        rounds = self.samples[-1].closed - self.samples[0].closed
        return {
            "devices": self.devices,
            "algorithm": self.algorithm,
            "model_bytes": self.model_bytes,
            "minutes": self.samples[-1].at_s / 60.0,
            "rounds": rounds,
            "nacks": self.nacks,
            "reminders": self.reminders,
            "first_third": first,
            "last_third": last,
            "flat": {name: is_flat(name, first[name], last[name], rounds) for name in SLACK},
            "samples": [{name: getattr(s, name) for name in SoakSample.__slots__} for s in self.samples],
        }


def thirds(samples: Sequence[SoakSample]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of the first and of the last third of the samples."""
    size = max(2, len(samples) // 3)
    return _figures(samples[:size]), _figures(samples[-size:])


def _figures(part: Sequence[SoakSample]) -> dict[str, float]:
    begin, end = part[0], part[-1]
    rounds = max(1, end.closed - begin.closed)
    return {
        "rss_mb": median(s.rss_mb for s in part),
        "open_files": float(median(s.open_files for s in part)),
        "database_bytes": float(median(s.database_bytes for s in part)),
        "seconds_per_round": (end.at_s - begin.at_s) / rounds,
        "aggregator_cpu_s_per_round": (end.aggregator_cpu_s - begin.aggregator_cpu_s) / rounds,
    }


def is_flat(name: str, first: float, last: float, rounds: int = 0) -> bool:
    """Return whether the figure ``name`` is no higher in the last third than in the first, within RISE_MOST and SLACK.

    Args:
        name: one of SLACK.
        first: the figure in the first third.
        last: the figure in the last third.
        rounds: rounds of the soak; the database may grow by RECORD_BYTES for each.
    """
    records = RECORD_BYTES * rounds if name == "database_bytes" else 0
    return last <= first * (1.0 + RISE_MOST) + SLACK[name] + records


def measure(devices: int, minutes: float, algorithm: str = "fedavg") -> SoakFigures:
    """Run a soak of ``minutes`` minutes.

    Raises:
        StageError: a process ended by itself, or no round closed for STALLED_S.
    """
    length_s = 60.0 * minutes
    interval_s = max(LEAST_INTERVAL_S, length_s / SAMPLES)
    with LoadFleet(devices=devices, algorithm=algorithm, rounds=ROUNDS) as fleet:
        fleet.start_aggregator()
        fleet.start_drivers()
        _wait_for_rounds(fleet, min(WARM_UP_S, 0.1 * length_s))
        samples: list[SoakSample] = []
        begin_s = changed_s = time.monotonic()
        while not samples or samples[-1].at_s < length_s:
            now_s = time.monotonic()
            found = _sample(fleet, fleet.sample(now_s - begin_s))
            if not samples or found.closed > samples[-1].closed:
                changed_s = now_s
            elif now_s - changed_s > STALLED_S:
                raise StageError(f"no round closed for {STALLED_S:g} s\n{fleet.aggregator.tail()}")
            samples.append(found)
            time.sleep(interval_s)
        reports = fleet.reports()
        nacks, reminders = sum(r.nacks for r in reports), sum(r.reminders for r in reports)
        return SoakFigures(
            devices=devices,
            algorithm=algorithm,
            model_bytes=fleet.model_bytes,
            samples=tuple(samples),
            nacks=nacks,
            reminders=reminders,
        )


def _wait_for_rounds(fleet: LoadFleet, warm_up_s: float) -> None:
    """Return ``warm_up_s`` after the first round has closed."""
    give_up_s = time.monotonic() + STALLED_S
    while not fleet.sample(0.0).closed:
        if time.monotonic() > give_up_s:
            raise StageError(f"no round closed in {STALLED_S:g} s\n{fleet.aggregator.tail()}")
        time.sleep(0.1)
    time.sleep(warm_up_s)


def _sample(fleet: LoadFleet, seen: Sample) -> SoakSample:
    size = sum(_size(fleet.run_dir / f"{DATABASE}{suffix}") for suffix in ("", "-wal", "-shm"))
    return SoakSample(
        at_s=seen.at_s,
        closed=seen.closed,
        rss_mb=seen.rss_mb,
        open_files=seen.open_files,
        database_bytes=size,
        aggregator_cpu_s=seen.aggregator_cpu_s,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # SQLite makes and removes its side files
        return 0


def plot(figures: SoakFigures, path: Path) -> None:
    """Draw memory, open files, database size, CPU and seconds a round over the minutes of a soak.

    Raises:
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    from shoal.report.plot import Line, Panel, draw

    samples = figures.samples
    minutes = [s.at_s / 60.0 for s in samples]
    pairs = list(itertools.pairwise(samples))
    rounds = [max(1, b.closed - a.closed) for a, b in pairs]
    seconds = [(b.at_s - a.at_s) / n for (a, b), n in zip(pairs, rounds, strict=True)]
    cpu_ms = [1e3 * (b.aggregator_cpu_s - a.aggregator_cpu_s) / n for (a, b), n in zip(pairs, rounds, strict=True)]
    curves: list[tuple[str, str, Sequence[float], Sequence[float]]] = [
        ("Resident memory", "MB", minutes, [s.rss_mb for s in samples]),
        ("Open files", "files", minutes, [s.open_files for s in samples]),
        ("Database", "MB", minutes, [s.database_bytes / 2**20 for s in samples]),
        ("Aggregator's CPU", "ms a round", minutes[1:], cpu_ms),
        ("Round time", "s", minutes[1:], seconds),
    ]
    name = f"{figures.devices} devices, {figures.algorithm}"
    draw(
        [
            Panel(title=title, x_label="minutes", y_label=unit, lines=[Line(name, x, y)], levels={})
            for title, unit, x, y in curves
        ],
        path,
    )
