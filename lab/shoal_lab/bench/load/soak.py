"""`shoal bench soak`: one run for many minutes, to see whether the aggregator's memory, files and times stay flat.

The fleet is that of `shoal_lab.bench.load.fleet_load`, with rounds in unbroken succession; nothing waits between them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from shoal import limits
from shoal.simulation.process_fleet import StageError
from shoal.util.console import counted
from shoal_lab.bench.load.fleet_load import STALLED_S, LoadFleet

ROUNDS: Final = limits.MAX_ROUNDS
"""As many as a run may have: a soak of some hours closes fewer."""
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
KEPT: Final = (
    "at_s",
    "closed",
    "rss_mb",
    "open_files",
    "database_bytes",
    "coordinator_vector_bytes",
    "aggregator_cpu_s",
)
"""Figures of a sample; seconds since the first one, memory in MB of 2^20 bytes."""


def figures(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples of a soak, at least four, and its first and last third compared."""
    size = max(2, len(samples) // 3)
    first, last = _third(samples[:size]), _third(samples[-size:])
    rounds = samples[-1]["closed"] - samples[0]["closed"]
    return {
        "minutes": samples[-1]["at_s"] / 60.0,
        "rounds": rounds,
        "first_third": first,
        "last_third": last,
        "flat": {name: is_flat(name, first[name], last[name], rounds) for name in SLACK},
        "samples": [{name: s[name] for name in KEPT} for s in samples],
    }


def _third(part: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    begin, end = part[0], part[-1]
    rounds = max(1, end["closed"] - begin["closed"])
    return {
        "rss_mb": median(s["rss_mb"] for s in part),
        "open_files": float(median(s["open_files"] for s in part)),
        "database_bytes": float(median(s["database_bytes"] for s in part)),
        "seconds_per_round": (end["at_s"] - begin["at_s"]) / rounds,
        "aggregator_cpu_s_per_round": (end["aggregator_cpu_s"] - begin["aggregator_cpu_s"]) / rounds,
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


def measure(devices: int, minutes: float) -> dict[str, Any]:
    """Run a soak of ``minutes`` minutes; return its `figures`.

    Raises:
        StageError: a process ended by itself, or no round closed for STALLED_S.
    """
    length_s = 60.0 * minutes
    interval_s = max(LEAST_INTERVAL_S, length_s / SAMPLES)
    with LoadFleet(devices=devices, rounds=ROUNDS) as fleet:
        fleet.start_aggregator()
        fleet.start_drivers()
        samples: list[dict[str, Any]] = []
        begin_s = changed_s = time.monotonic()
        closed = 0
        while not samples or samples[-1]["at_s"] < length_s:
            now_s = time.monotonic()
            found = fleet.sample(now_s - begin_s)
            if found["closed"] > closed:
                changed_s = now_s
            elif now_s - changed_s > STALLED_S:
                raise StageError(f"no round closed for {STALLED_S:g} s\n{fleet.programs['aggregator'].tail()}")
            if closed:
                samples.append(found)
                time.sleep(interval_s)
            else:
                time.sleep(min(WARM_UP_S, 0.1 * length_s) if found["closed"] else 0.1)
                begin_s = time.monotonic()
            closed = found["closed"]
        reports = fleet.reports()
        return {
            "devices": devices,
            "algorithm": fleet.algorithm,
            "model_bytes": fleet.model_bytes,
            "nacks": sum(r["nacks"] for r in reports),
            "reminders": sum(r["reminders"] for r in reports),
            **figures(samples),
        }


def words(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as text."""
    return [
        f"{counted(data['devices'], 'device')}, {data['minutes']:.1f} minutes, {counted(data['rounds'], 'round')}; "
        f"{counted(data['nacks'], 'NACK')}, {counted(data['reminders'], 'reminder')}",
        *thirds(data),
    ]


def thirds(data: Mapping[str, Any]) -> list[str]:
    """Return the table of `figures`: each figure in both thirds, and whether it is flat."""
    return [
        f"{'':28} {'first third':>14} {'last third':>14}",
        *(
            f"{name:28} {data['first_third'][name]:14.4g} {data['last_third'][name]:14.4g}  {'flat' if flat else 'rises'}"
            for name, flat in data["flat"].items()
        ),
    ]


def plot(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw memory, open files, database, CPU and time an upload; of one soak by minutes, of several runs by share of rounds.

    Raises:
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    from shoal.report.plot import Line, Panel, draw

    lines: dict[tuple[str, str], list[Line]] = {}
    for run in runs:
        samples, devices = run["samples"], run["devices"]
        last = samples[-1]
        x = [s["at_s"] / 60.0 if len(runs) == 1 else 100.0 * s["closed"] / last["closed"] for s in samples]
        pairs = list(itertools.pairwise(samples))
        uploads = [devices * max(1, b["closed"] - a["closed"]) for a, b in pairs]
        curves: dict[tuple[str, str], Sequence[float]] = {
            ("Resident memory", "MB"): [s["rss_mb"] for s in samples],
            ("Open files", "files"): [s["open_files"] for s in samples],
            ("Database", "MB"): [s["database_bytes"] / 2**20 for s in samples],
        }
        for title, name in (("Aggregator's CPU", "aggregator_cpu_s"), ("Time", "at_s")):
            spent = [b[name] - a[name] for a, b in pairs]
            curves[title, "ms an upload"] = [1e3 * s / n for s, n in zip(spent, uploads, strict=True)]
        name = f"{devices} devices, {last['closed']} rounds, {run['algorithm']}"
        for at, y in curves.items():
            lines.setdefault(at, []).append(Line(name, x[-len(y) :], y))
    x_label = "minutes" if len(runs) == 1 else "rounds, %"
    draw(
        [Panel(title=t, x_label=x_label, y_label=unit, lines=found, levels={}) for (t, unit), found in lines.items()],
        path,
    )
