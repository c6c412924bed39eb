"""The conversation of a system's program with the benchmark: a line in, a round of training, a line out.

The program waits for a line on its standard input, trains a round, and answers with the CPU seconds that this took all its
processes. After the last round it answers with its accuracy on the test samples and its largest memory. Standard output carries
nothing else: it is taken away from the program, whose prints go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

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
