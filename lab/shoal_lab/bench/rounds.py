"""`shoal bench round`: seconds of a warm round with persistent device processes on a real broker.

An MLP 784-200-10 (636 KB), 600 MNIST-shaped training samples a device, batch 50, one epoch, FedAvg. Nothing is switched off:
updates are masked, signed, sealed, and durable before the acknowledgement.

All processes share this machine, so a round is bounded by its cores. The same run therefore measures the CPU time of the
gradient steps alone, and reports the round as a multiple of it, which can be compared between machines. Measured figures are in
docs/adr/0015-what-bounds-a-round.md.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.modes import registry
from edge_client.learning import data as device_data
from edge_client.learning.model import OrtModel
from edge_client.learning.training import train
from shoal.owner.task_compiler.builtin import build
from shoal.owner.task_compiler.compile import compile_task
from shoal.owner.task_compiler.origin import make_origins
from shoal.protocol.documents import RunPlan
from shoal.protocol.recipe import DEFAULTS, LocalTraining, Recipe
from shoal.simulation.process_fleet import Stage
from shoal.task.bundle import TaskBundle
from shoal.transport.local_broker import BrokerProcess, start_broker
from shoal.types import Float32Vector
from shoal.util.console import counted, mask_words

MODEL_SIZES: Final = {"inputs": 784, "hidden": 200, "classes": 10}
SAMPLES: Final = 1000
"""Samples per device, of which it trains on 60%: 600."""
WARM_UP_ROUNDS: Final = 4
MEASURED_ROUNDS: Final = 20
TRAININGS: Final = 9
"""Local trainings whose median is the bound's measure."""
LOCAL: Final = LocalTraining(epochs=1, batch_size=50, lr=0.1)


def measure(
    devices: int,
    broker_kind: str = "auto",
    mode: str = DEFAULTS.mode,
    rounds: int = MEASURED_ROUNDS,
    hidden: int = MODEL_SIZES["hidden"],
) -> dict[str, Any]:
    """Run the benchmark once.

    ``seconds_bound_by_training`` is the lower bound of a round on this machine: every device's gradient steps, spread evenly over
    the cores. ``bound_ratio`` is a round in units of it. Memory is in MB of 2^20 bytes.

    Args:
        devices: number of device processes.
        broker_kind: the broker to start, as `start_broker` knows it.
        mode: the mask mode.
        rounds: number of measured rounds, after WARM_UP_ROUNDS others.
        hidden: units of the hidden layer; each has 795 of the model's coordinates.

    Raises:
        ConfigError: there is no such mode or broker.
    """
    registry.find(mode)  # before a broker is started
    bundle, origins = make_task(hidden)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        data = [write_data(Path(folder) / f"data-{i}.npz", i) for i in range(devices)]
        training_s = training_seconds(bundle, origins[0], data[0])
        with fleet(broker_kind, bundle, origins, data, WARM_UP_ROUNDS + rounds, mode) as (stage, broker, plan):
            records = stage.wait(plan.run, timeout_s=60 + 5 * rounds * max(1, hidden // MODEL_SIZES["hidden"]))
            return {
                **figures(
                    [r["seconds"] for r in records[WARM_UP_ROUNDS : WARM_UP_ROUNDS + rounds]], training_s, devices
                ),
                "model_bytes": 4 * plan.length,
                "broker": broker.kind,
                "mode": plan.recipe.mode,
                "device_rss_mb_max": max(stage.programs[n].peak_rss_mb() for n in stage.devices),
                "aggregator_rss_mb_max": stage.programs["aggregator"].peak_rss_mb(),
            }


@contextmanager
def fleet(
    broker_kind: str,
    bundle: TaskBundle,
    origins: NDArray[np.float32],
    data: Sequence[Path],
    rounds: int,
    mode: str,
) -> Iterator[tuple[Stage, BrokerProcess, RunPlan]]:
    """Run a broker, an aggregator and a device for each file of ``data`` within the block, with a run of so many rounds."""
    names = tuple(f"dev-{i:02d}" for i in range(len(data)))
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        start_broker(broker_kind, Path(folder) / "broker") as broker,
        Stage(Path(folder) / "fleet", broker.url, names) as stage,
    ):
        options = Recipe(
            "fedavg",
            rounds=rounds,
            local=LOCAL,
            # One device can be measured too.
            min_contributors=min(DEFAULTS.min_contributors, len(names)),
            quorum=1.0,
            seed=0,
            mode=mode,
        )
        plan = stage.add_run(bundle, origins, options)
        stage.start_aggregator("--log", "warning")
        for name, source in zip(names, data, strict=True):
            stage.start_device(name, source, "--log", "warning")
        yield stage, broker, plan


def figures(seconds: Sequence[float], training_s: float, devices: int, cores: int = 0) -> dict[str, Any]:
    """Return the times of rounds, and their ratio to what training alone takes.

    Args:
        seconds: the aggregator's time of each round, from opening it to opening the next.
        training_s: CPU seconds of one device's gradient steps in one round, alone on one thread.
        devices: number of device processes.
        cores: cores that they share; 0 stands for those that this process may use.
    """
    cores = cores or len(os.sched_getaffinity(0))
    bound_s = training_s * max(1.0, devices / cores)
    return {
        "seconds_per_round_median": median(seconds),
        "seconds_per_round_min": min(seconds),
        "seconds_per_round_max": max(seconds),
        "rounds": len(seconds),
        "seconds_training_alone": training_s,
        "seconds_bound_by_training": bound_s,
        "bound_ratio": median(seconds) / bound_s,
        "cores": cores,
        "devices": devices,
    }


def words(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as text."""
    return [
        f"{data['seconds_per_round_median']:.3f} s a round (median of {data['rounds']}, "
        f"{data['seconds_per_round_min']:.3f} to {data['seconds_per_round_max']:.3f}), "
        f"{counted(data['devices'], 'device')} on {data['broker']}, mask {mask_words(data['mode'])}",
        f"{data['bound_ratio']:.1f} times what the gradient steps alone take here: {data['devices']} x "
        f"{1e3 * data['seconds_training_alone']:.1f} ms on {data['cores']} cores",
        f"model {data['model_bytes']} bytes; peak memory: device {data['device_rss_mb_max']:.0f} MB, "
        f"aggregator {data['aggregator_rss_mb_max']:.0f} MB",
    ]


def make_task(hidden: int = MODEL_SIZES["hidden"]) -> tuple[TaskBundle, NDArray[np.float32]]:
    """Return the MLP's task, with so many ``hidden`` units, and a starting model (1, d), float32."""
    sizes = MODEL_SIZES | {"hidden": hidden}
    task = build("mlp", **sizes)
    bundle = compile_task(task.model, task.loss, task.example, name="mlp", kind=task.kind, hyper=task.hyper)
    return bundle, make_origins("mlp", 1, None, manifest=bundle.manifest, **sizes)


def training_seconds(bundle: TaskBundle, theta: Float32Vector, source: Path) -> float:
    """Return the CPU seconds of one local training on a device's file, as the median of TRAININGS on one thread.

    Args:
        bundle: the task.
        theta: shape (d,), float32, where each training begins.
        source: the device's samples.
    """
    batch = device_data.split(device_data.load(source, bundle.manifest), b"bound").train
    backend, rng = OrtModel(bundle), np.random.default_rng(0)
    durations_s = []
    for number in range(TRAININGS + 1):
        began_s = time.thread_time()
        train(theta, batch, LOCAL, backend, rng, number, lambda: False)
        durations_s.append(time.thread_time() - began_s)
    # The first training also fills the caches and the runtime's buffers.
    return median(durations_s[1:])


def write_data(path: Path, seed: int) -> Path:
    """Write a device's SAMPLES samples, shaped like MNIST's: 784 numbers in [0, 1], one of 10 labels. Return the path."""
    rng = np.random.default_rng(seed)
    x = rng.random((SAMPLES, MODEL_SIZES["inputs"]), np.float32)
    np.savez(path, x=x, y=rng.integers(0, MODEL_SIZES["classes"], SAMPLES))
    return path
