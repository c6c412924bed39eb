"""The number of processor cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUP: Final = Path("/proc/self/cgroup")


def usable_cores(groups: Path = CGROUPS, own_group: Path = OWN_GROUP) -> int:
    """Return the number of cores that this process may use, at least 1.

    The scheduler's affinity (taskset, cpusets) limits it, and the CPU quota of control groups (systemd's CPUQuota=, docker's
    --cpus), rounded up.

    Args:
        groups: where the hierarchy of control groups, version 2, is mounted.
        own_group: the file that names the group of this process.
    """
    return max(1, math.ceil(min(float(len(os.sched_getaffinity(0))), *_quotas(groups, own_group))))


def _quotas(groups: Path, own_group: Path) -> Iterator[float]:
    """Yield the quota, in cores, of each control group that this process is in; infinity without one."""
    yield math.inf
    try:
        line = next(line for line in own_group.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return  # no control groups, or only those of version 1
    group = groups / line[3:].lstrip("/")
    while group.is_relative_to(groups):
        yield _quota(group / "cpu.max")
        group = group.parent


def _quota(file: Path) -> float:
    try:
        allowed_us, period_us = file.read_text().split()
        return math.inf if allowed_us == "max" else int(allowed_us) / int(period_us)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf  # the root group has no such file
