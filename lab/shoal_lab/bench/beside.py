"""`shoal bench round --beside flower`: a warm round of Shoal and of Flower, in turn, with the same model, data and training.

Flower runs `start_server` and `start_client` on gRPC without TLS, its fastest way, with clients on torch and on numpy alone. It
seals, signs, masks and stores nothing; Shoal does all of it. Each turn starts its processes anew, and measures them after the
rounds that warm up. Pairs are compared by the CPU time of all processes: wall time depends on what else loads the machine.

Syncs (fsync, fdatasync) are counted in a turn of their own, since tracing a process slows it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.simulation.process_fleet import Stage, cpu_seconds
from shoal.transport.local_broker import BrokerProcess, answers, free_port
from shoal.util.console import counted, mask_words
from shoal.util.process import small_heap
from shoal_lab.bench import rounds as bench
from shoal_lab.bench.numerics.kernels import Bench
from shoal_lab.bench.privacy.benchmark import cost, measure_seal
from shoal_lab.bench.race.benchmark import PEERS, install_peer

CLIENTS: Final = ("torch", "numpy")
"""What Flower's clients train with."""
FIGURES: Final[Mapping[str, str]] = {
    "cpu_ms": "CPU ms",
    "cpu_ms_devices": "of devices",
    "wall_ms": "wall ms",
    "device_peak_mb": "device MB",
    "server_peak_mb": "server MB",
    "written_bytes": "bytes written",
    "syncs": "syncs",
}
"""Figures of a turn, the last two only for root, and their heads in the table."""
PAIRS: Final = 15
SPARE_ROUNDS: Final = 5
"""Rounds after the measured ones, so that all processes still run when they are read."""
SERVER: Final = "aggregator"
OVER: Final = "\na round is over\n"

Start = Callable[[], AbstractContextManager[tuple[Stage, BrokerProcess | None, Any]]]
"""Starts a fleet, Shoal's with a broker."""


class Flower(Stage):
    """A fleet on Flower, whose server has the aggregator's name.

    Args:
        root: folder for its logs.
        command: starts `flower_fleet` in Flower's environment.
    """

    def __init__(self, root: Path, command: Sequence[str]) -> None:
        self.root, self.programs, self._command, self.devices = root, {}, list(command), ()

    def _software(self, _name: str, _package: str) -> tuple[str, Path | None, dict[str, str]]:
        start = f"import os, sys; os.execv({self._command[0]!r}, [*{self._command!r}, *sys.argv[1:]])"
        return start, None, {"FLWR_TELEMETRY_ENABLED": "0"}

    def closed(self, _run: int) -> int:
        """Return the number of rounds that are over."""
        return self.log_of(SERVER).read_text(errors="replace").count(OVER)

    def start(self, name: str, words: str) -> None:
        """Start a server or a client with its argument."""
        self._start(name, "", [words])
        self.devices = tuple(self.programs.keys() - {SERVER})


@contextmanager
def flower(
    command: Sequence[str], client: str, data: Sequence[Path], rounds: int
) -> Iterator[tuple[Stage, None, None]]:
    """Run a fleet on Flower within the block, with a server of so many rounds, and a client for each file of ``data``.

    Args:
        command: starts `flower_fleet` in Flower's environment.
        client: what the clients train with, one of CLIENTS.
        data: the clients' samples.
        rounds: rounds of the server.
    """
    port = free_port()
    common = {"address": f"127.0.0.1:{port}", "lr": bench.LOCAL.lr, "batch": bench.LOCAL.batch_size}
    inputs, hidden, classes = bench.MODEL_SIZES.values()
    shapes = ((hidden, inputs), (hidden,), (classes, hidden), (classes,))
    told = {SERVER: {"devices": len(data), "rounds": rounds, "shapes": shapes, "over": OVER}}
    told |= {path.stem: {"client": client, "data": str(path), "samples": bench.SAMPLES * 6 // 10} for path in data}
    with tempfile.TemporaryDirectory(prefix="flower-bench-") as folder, Flower(Path(folder), command) as stage:
        for name, words in told.items():
            stage.start(name, json.dumps(common | words))
            while not answers(port):  # a client gives up at once if the server doesn't listen yet
                stage.check()
                time.sleep(0.05)
        yield stage, None, None


def measure(
    devices: int,
    broker_kind: str,
    mode: str,
    rounds: int = bench.MEASURED_ROUNDS,
    pairs: int = PAIRS,
    *,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run the pairs; return the JSON object of ``shoal bench round --beside flower``.

    A pair has a turn of each system, whose figures are means over its rounds: CPU milliseconds of all processes, and of the
    devices; wall milliseconds; the largest memory of a device and of the server in MB of 2^20 bytes; bytes that the kernel was
    given for a disk; syncs. ``medians`` has the median of each over the pairs, ``ratios`` the median of Shoal's figure divided by
    the other's in the same pair. ``parts`` has Shoal's CPU milliseconds by part: mask, seal and training as measured alone, and
    the rest: the interpreter, MQTT, threads, files, the aggregator's mean and the broker. ``history`` has a row for each pair.

    Args:
        devices: number of device processes.
        broker_kind: Shoal's broker, as `start_broker` knows it.
        mode: Shoal's mask mode.
        rounds: measured rounds of each turn.
        pairs: number of pairs.
        progress: is told of the installation and of each pair.

    Raises:
        ConfigError: there is no such mode or broker, or Flower can't be installed.
        StageError: a process ended.
    """
    bundle, origins = bench.make_task()
    small_heap()  # a device's: without it a mask alone costs more page faults than time to compute
    parts = parts_of(devices, mode, origins[0].size)  # which also finds the mode, before anything is installed
    command = [
        str(install_peer("flower-fleet", progress)),
        "-I",
        str(Path(__file__).with_name("flower_fleet.py")),
    ]
    last = bench.WARM_UP_ROUNDS + rounds + SPARE_ROUNDS
    rows: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-beside-") as folder:
        data = [bench.write_data(Path(folder) / f"data-{i}.npz", i) for i in range(devices)]
        systems: dict[str, Start] = {"shoal": partial(bench.fleet, broker_kind, bundle, origins, data, last, mode)}
        systems |= {f"flower-{client}": partial(flower, command, client, data, last) for client in CLIENTS}
        for pair in range(1, pairs + 1):
            # Backwards in every other pair, so that what slowly changes on the machine favours no system.
            rows.append({name: watch(systems[name], rounds) for name in sorted(systems, reverse=pair % 2 == 1)})
            progress(
                f"pair {pair} of {pairs}: CPU ms a round: "
                + ", ".join(f"{name} {rows[-1][name]['cpu_ms']:.0f}" for name in systems)
            )
        syncs = {name: count_syncs(start, rounds, Path(folder) / name) for name, start in systems.items()}
        parts["training"] = 1e3 * devices * bench.training_seconds(bundle, origins[0], data[0])
    found = summary(rows, syncs)
    return found | {
        "beside": PEERS["flower-fleet"],
        "devices": devices,
        "rounds": rounds,
        "mode": mode,
        "model_bytes": origins[0].nbytes,
        "parts": parts | {"rest": found["medians"]["shoal"]["cpu_ms"] - sum(parts.values())},
        "pairs": pairs,
        "history": [{f"{n} {key}": one[n][key] for n in systems for key in one[n]} for one in rows],
    }


def watch(start: Start, rounds: int) -> dict[str, float]:
    """Return the figures of a fleet over so many rounds after those that warm up; without those that can't be read."""
    with start() as (stage, broker, _):
        begin, end = _window(stage, broker, rounds)
        at, devices, servers, written = (end - begin)[1:] / (end - begin)[0]
        memory = [stage.programs[name].peak_rss_mb() for name in (SERVER, *stage.devices)]
    found = (1e3 * (devices + servers), 1e3 * devices, 1e3 * at, max(memory[1:]), memory[0], written)
    return {name: float(f"{value:.4g}") for name, value in zip(FIGURES, found, strict=False) if not np.isnan(value)}


def count_syncs(start: Start, rounds: int, place: Path) -> float:
    """Return the syncs a round of a fleet; NaN if strace isn't installed or may not trace.

    Args:
        start: starts the fleet.
        rounds: rounds to count in.
        place: file for the traced calls.
    """
    strace = shutil.which("strace")
    if strace is None:
        return float("nan")
    with start() as (stage, broker, _):
        pids = [f"--attach={one.pid}" for one in (*stage.programs.values(), broker) if one]
        what = ["-f", "-q", "-ttt", "-e", "trace=fsync,fdatasync", "-e", "signal=none", "-o", str(place)]
        process = subprocess.Popen([strace, *what, *pids], stderr=subprocess.DEVNULL)
        try:
            begin, end = _window(stage, broker, rounds)
        finally:
            refused = process.poll() is not None
            process.terminate()
            process.wait()
    if refused:
        return float("nan")
    times = re.findall(r"^\d+ +(\d+\.\d+) f(?:data)?sync\(", place.read_text(), re.MULTILINE)
    return float(sum(begin[1] <= float(at) <= end[1] for at in times) / (end[0] - begin[0]))


def _window(stage: Stage, broker: BrokerProcess | None, rounds: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rounds over, time, CPU seconds of devices and of the others, and bytes written, at both ends of the rounds."""
    begin = _read(stage, broker, bench.WARM_UP_ROUNDS)
    return begin, _read(stage, broker, int(begin[0]) + rounds)


def _read(stage: Stage, broker: BrokerProcess | None, rounds: int) -> NDArray[np.float64]:
    while (closed := stage.closed(1)) < rounds:
        stage.check()
        time.sleep(0.01)
    devices = [stage.programs[name].pid for name in stage.devices]
    servers = [stage.programs[SERVER].pid, *([broker.pid] if broker else [])]
    try:
        written = sum(
            float(Path(f"/proc/{pid}/io").read_text().partition("\nwrite_bytes:")[2].split()[0])
            for pid in (*devices, *servers)
        )
    except PermissionError:  # these processes forbid inspection to all but root
        written = float("nan")
    return np.array([closed, time.time(), sum(map(cpu_seconds, devices)), sum(map(cpu_seconds, servers)), written])


def summary(rows: Sequence[Mapping[str, Mapping[str, float]]], syncs: Mapping[str, float]) -> dict[str, Any]:
    """Return the medians of all systems, and of the ratios in each pair; a figure that is 0 beside Shoal's has none."""
    medians = {name: {key: median(row[name][key] for row in rows) for key in first} for name, first in rows[0].items()}
    ratios = {
        name: {
            key: median(row["shoal"][key] / row[name][key] for row in rows)
            for key in medians["shoal"].keys() & found
            if all(row[name][key] for row in rows)
        }
        for name, found in medians.items()
        if name != "shoal"
    }
    for name, count in syncs.items():
        medians[name] |= {} if np.isnan(count) else {"syncs": count}
    return {"medians": medians, "ratios": ratios}


def parts_of(devices: int, mode: str, length: int) -> dict[str, float]:
    """Return the CPU milliseconds a round of mask and seal, measured alone on one thread, times the devices.

    A device derives its mask, masks an update, and takes the mask off a mean; it seals the update, which the aggregator opens,
    and opens the mean.
    """
    mask, seal = cost(mode, length, Bench(quick=False), runs=5), measure_seal(quick=False)
    return {
        "mask": devices * sum(mask[name] for name in ("derive_ms", "apply_ms", "invert_ms")),
        "seal": devices * mask["bytes"] / 1e6 * (seal["seal_ms_per_mb"] + 2 * seal["open_ms_per_mb"]),
    }


def words(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as text."""

    def line(name: str, found: Mapping[str, float]) -> str:
        return f"{name:22}" + "".join(f"{found[key]:15.4g}" if key in found else f"{'-':>15}" for key in FIGURES)

    return [
        f"{counted(data['pairs'], 'pair')} of {data['rounds']} warm rounds, {counted(data['devices'], 'device')}, model of "
        f"{data['model_bytes']} bytes, mask {mask_words(data['mode'])}, beside {data['beside']}",
        f"{'a round, median':22}" + "".join(f"{head:>15}" for head in FIGURES.values()),
        *(line(name, found) for name, found in data["medians"].items()),
        *(line(f"shoal / {name}", found) for name, found in data["ratios"].items()),
        "Shoal's CPU ms: " + ", ".join(f"{name} {value:.0f}" for name, value in data["parts"].items()),
        "compare the CPU time: wall time depends on what else loads this machine",
        *(
            f"left out: {FIGURES[k]}, for root only, syncs with strace"
            for k in FIGURES
            if k not in data["medians"]["shoal"]
        ),
    ]
