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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.modes import registry
from edge_client.learning import data as device_data
from edge_client.learning.model import OrtModel
from edge_client.learning.training import train
from shoal.owner.runs.defaults import DEFAULT_MIN_CONTRIBUTORS, DEFAULT_MODE
from shoal.owner.runs.plan import RunOptions
from shoal.owner.task_compiler.builtin import build
from shoal.owner.task_compiler.compile import compile_task
from shoal.owner.task_compiler.origin import make_origins
from shoal.simulation.process_fleet import Stage
from shoal.task.bundle import TaskBundle
from shoal.task.manifest import LocalTraining
from shoal.transport.local_broker import start_broker
from shoal.types import Float32Vector

MODEL_SIZES: Final = {"inputs": 784, "hidden": 200, "classes": 10}
SAMPLES: Final = 1000
"""Samples per device, of which it trains on 60%: 600."""
WARM_UP_ROUNDS: Final = 4
MEASURED_ROUNDS: Final = 20
TRAININGS: Final = 9
"""Local trainings whose median is the bound's measure."""
LOCAL: Final = LocalTraining(epochs=1, batch_size=50, lr=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """Results of the benchmark.

    Attributes:
        seconds: the aggregator's time of each round, from opening it to opening the next.
        training_s: CPU seconds of one device's gradient steps in one round, alone on one thread.
        cores: cores that this run may use.
        devices: number of device processes.
        model_bytes: size of the model's vector.
        broker: kind of the broker.
        mode: mask mode of the run.
        device_rss_mb_max: peak memory of the largest device process, in MB of 2^20 bytes.
        aggregator_rss_mb_max: peak memory of the aggregator, in the same unit.
    """

    seconds: tuple[float, ...]
    training_s: float
    cores: int
    devices: int
    model_bytes: int
    broker: str
    mode: str
    device_rss_mb_max: float
    aggregator_rss_mb_max: float

    @property
    def bound_s(self) -> float:
        """Lower bound of a round on this machine: every device's gradient steps, spread evenly over the cores."""
        return self.training_s * max(1.0, self.devices / self.cores)

    def data(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return {
            "seconds_per_round_median": median(self.seconds),
            "seconds_per_round_min": min(self.seconds),
            "seconds_per_round_max": max(self.seconds),
            "rounds": len(self.seconds),
            "seconds_training_alone": self.training_s,
            "seconds_bound_by_training": self.bound_s,
            "bound_ratio": median(self.seconds) / self.bound_s,
            "cores": self.cores,
            "devices": self.devices,
            "model_bytes": self.model_bytes,
            "broker": self.broker,
            "mode": self.mode,
            "device_rss_mb_max": self.device_rss_mb_max,
            "aggregator_rss_mb_max": self.aggregator_rss_mb_max,
        }


def measure(
    devices: int, broker_kind: str = "auto", rounds: int = MEASURED_ROUNDS, mode: str = DEFAULT_MODE
) -> RoundFigures:
    """Run the benchmark once.

    Args:
        devices: number of device processes.
        broker_kind: the broker to start, as `start_broker` knows it.
        rounds: number of measured rounds, after WARM_UP_ROUNDS others.
        mode: the mask mode.

    Raises:
        ConfigError: there is no such mode or broker.
    """
    registry.find(mode)  # before a broker is started
    bundle, origins = make_task()
    names = tuple(f"dev-{i:02d}" for i in range(devices))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        root = Path(folder)
        (root / "broker").mkdir()
        data = [write_data(root / f"data-{i}.npz", i) for i in range(devices)]
        training_s = training_seconds(bundle, origins[0], data[0])
        with (
            start_broker(broker_kind, root / "broker") as broker,
            Stage(root / "fleet", broker.url, names) as stage,
        ):
            options = RunOptions(
                "fedavg",
                rounds=WARM_UP_ROUNDS + rounds,
                local=LOCAL,
                # One device can be measured too.
                min_contributors=min(DEFAULT_MIN_CONTRIBUTORS, devices),
                quorum=1.0,
                seed=0,
                mode=mode,
            )
            plan = stage.add_run(bundle, origins, options)
            stage.start_aggregator("--log", "warning")
            for name, source in zip(names, data, strict=True):
                stage.start_device(name, source, "--log", "warning")
            records = stage.wait(plan.run, timeout_s=60 + 5 * rounds)
            seconds = tuple(r["seconds"] for r in records[WARM_UP_ROUNDS : WARM_UP_ROUNDS + rounds])
            device_rss = max(stage.programs[n].peak_rss_mb() for n in names)
            aggregator_rss = stage.programs["aggregator"].peak_rss_mb()
            return RoundFigures(
                seconds=seconds,
                training_s=training_s,
                cores=len(os.sched_getaffinity(0)),
                devices=devices,
                model_bytes=4 * plan.length,
                broker=broker.kind,
                mode=plan.mode,
                device_rss_mb_max=device_rss,
                aggregator_rss_mb_max=aggregator_rss,
            )


def make_task() -> tuple[TaskBundle, NDArray[np.float32]]:
    """Return the MLP's task, and a starting model (1, d), float32."""
    task = build("mlp", **MODEL_SIZES)
    bundle = compile_task(task.model, task.loss, task.example, name="mlp", kind=task.kind, hyper=task.hyper)
    return bundle, make_origins("mlp", 1, None, manifest=bundle.manifest, **MODEL_SIZES)


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
