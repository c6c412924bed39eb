"""The table of loads in deploy/README.md, made from saved results of `shoal bench load`.

`command_of` is the command that measures one fleet; with ``--save results/load.jsonl`` its result is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shoal.report import record
from shoal_lab.bench.load.fleet_load import UNLIKE_A_FLEET

ROOT: Final = Path(__file__).parents[4]
FILE: Final = Path("results", "load.jsonl")
ALGORITHMS: Final = ("fedavg", "ifca", "cfl")
FLEETS: Final = {"logistic": (10, 100, 500, 1000, 2000), "mlp": (10, 100, 500, 1000)}
ROUNDS: Final = {"logistic": 5, "mlp": 3}
HEADINGS: Final = {
    "devices": "devices",
    "seconds_per_round_median": "s a round",
    "aggregator_cpu_ms_per_upload": "aggregator, CPU ms an upload",
    "broker_cpu_s_per_round": "broker, CPU s a round",
    "aggregator_rss_mb_max": "aggregator, peak MB",
    "open_files_max": "open files",
    "uploads_counted": "uploads counted",
    "nacks": "NACKs",
    "reminders": "reminders",
}
UNLIKE: Final = ", ".join(f"{name} {value:g}" for name, value in UNLIKE_A_FLEET.items())
"""The options of a measured run that are not a fleet's defaults, for each row."""


def command_of(model: str, algorithm: str, devices: int) -> tuple[str, ...]:
    """Return the command that measures one fleet."""
    words = ("--devices", str(devices), "--model", model, "--algorithm", algorithm, "--rounds", str(ROUNDS[model]))
    return ("shoal", "bench", "load", *words)


def block() -> str:
    """Return the table: a line for each fleet with a saved result."""
    kept = {record.key_of(run): run["data"] for run in record.read_lines(ROOT / FILE)}
    rows = [
        f"| [{model}](../{FILE}) | {algorithm} | {' | '.join(_cell(data, name) for name in HEADINGS)} | {UNLIKE} |"
        for model, sizes in FLEETS.items()
        for algorithm, devices in itertools.product(ALGORITHMS, sizes)
        if (data := kept.get(command_of(model, algorithm, devices))) is not None
    ]
    head = f"| model | algorithm | {' | '.join(HEADINGS.values())} | not a fleet's default |"
    return "\n".join([head, "|---" * (len(HEADINGS) + 3) + "|", *rows])


def _cell(data: Mapping[str, Any], name: str) -> str:
    value = data[name]
    if name == "uploads_counted":
        return f"{value} of {data['uploads_expected']}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if name.endswith("_mb_max") else f"{value:.2f}"
