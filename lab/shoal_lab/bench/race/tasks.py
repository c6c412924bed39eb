"""The work of the race: devices with 200 samples of MNIST, an epoch of local training a round, and six models.

The file of a task holds data, starting model and recipe, so that every system does the same work.

`Turns` is the conversation between a program and the race.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

DEVICES: Final = 100
SAMPLES: Final = 200
"""Training samples of a device."""


@dataclass(frozen=True, slots=True)
class Task:
    """A model and its local training: plain SGD, one epoch a round.

    Attributes:
        name: "mlp", 784-200-10; "logistic", softmax regression; "cnn", two convolutions of 5x5 with pooling, and 120, 84 and 10
            units; "mlp-million", 784-1260-10; "cnn-wide", 32 and 64 filters of 3x3, padded, and 128 units, on images of 3x32x32;
            "transformer", one layer of width 64 with four heads on the rows of an image.
        batch: samples of a step.
        lr: step size.
        devices: most devices; coloured: whether images have three channels and 32x32 pixels, instead of one and 28x28.
    """

    name: str
    batch: int
    lr: float = 0.1
    devices: int = DEVICES
    coloured: bool = False


TASKS: Final[Mapping[str, Task]] = {
    task.name: task
    for task in (
        Task("mlp", 10),
        Task("logistic", 10),
        Task("cnn", 20, 0.3),
        Task("mlp-million", 10),
        Task("cnn-wide", 20, 0.1, 20, coloured=True),
        Task("transformer", 10, 0.2, 40),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A task's data and starting model.

    Attributes:
        task: the task.
        x: shape (devices, SAMPLES, pixels), float32 in [0, 1]; y: shape (devices, SAMPLES), int64.
        x_test: shape (n, pixels), float32; y_test: shape (n,), int64.
        theta: the starting model's parameters one after another in torch's order, shape (d,), float32.
    """

    task: Task
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    theta: NDArray[np.float32]

    def save(self, path: Path) -> None:
        """Write everything but the task to a file of numpy's, without pickle."""
        np.savez(path, x=self.x, y=self.y, x_test=self.x_test, y_test=self.y_test, theta=self.theta)

    @classmethod
    def load(cls, path: Path, task: str) -> Work:
        """Return what `save` wrote, in memory of its own."""
        with np.load(path, allow_pickle=False) as file:
            return cls(task=TASKS[task], **{name: file[name] for name in ("x", "y", "x_test", "y_test", "theta")})


GO: Final = "go\n"


class EndedError(Exception):
    """The benchmark wants no further round."""


def descendants_cpu_s() -> float:
    """Return the CPU seconds of all running processes that this one has started, directly or not, to a clock tick."""
    import psutil

    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            total += sum(process.cpu_times()[:4])
    return total


def peak_mb() -> float:
    """Return the largest memory that this program has held, in units of 2^20 bytes.

    The figure of ``getrusage`` would be that of the benchmark, if larger: it outlives the start of another program.
    """
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


class Turns:
    """The program's end of the conversation.

    Args:
        processes: whether other processes do a part of the work; their CPU time is known to a hundredth of a second.
    """

    def __init__(self, *, processes: bool = False) -> None:
        self._processes = processes
        self._out = os.fdopen(os.dup(1), "w", encoding="ascii")
        os.dup2(2, 1)
        self._begin = 0.0

    def _cpu_s(self) -> float:
        return time.process_time() + (descendants_cpu_s() if self._processes else 0.0)

    def begin(self) -> None:
        """Wait until a round is to be trained.

        Raises:
            EndedError: none is, the input has ended.
        """
        if sys.stdin.readline() != GO:
            raise EndedError
        self._begin = self._cpu_s()

    def trained(self) -> None:
        """Tell that the round is over."""
        self._tell({"cpu_s": self._cpu_s() - self._begin})

    def tested(self, accuracy: float) -> None:
        """Tell the share of test samples that the trained model gets right, after the last round."""
        self._tell({"accuracy": accuracy, "peak_mb": peak_mb()})

    def _tell(self, values: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()
