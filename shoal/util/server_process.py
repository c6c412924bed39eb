"""A server's process: its malloc heap, the limit on its open files, and the number of processor cores that it may use."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shoal.util.process import HEAP_PIECE_BYTES, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, set_malloc

HEAP_KEPT_BYTES: Final = 32 << 20
"""Free bytes at the heap's end that are not returned to the system, since the next round needs them again."""


def keep_heap() -> bool:
    """Stop malloc from returning freed memory to the system, for a server that needs the same megabytes every round.

    Returns:
        False if the C library is not glibc, or the environment sets MALLOC_... variables. The program then works with
        malloc's defaults and takes more CPU time.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    return set_malloc((M_MMAP_THRESHOLD, HEAP_PIECE_BYTES), (M_TRIM_THRESHOLD, HEAP_KEPT_BYTES))


def raise_open_files() -> int:
    """Raise the soft limit on open files of this process to the hard limit, and return that (RLIM_INFINITY if unlimited)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def raise_open_files_limit(needed: int) -> str:
    """Raise the soft limit on open files to the hard limit.

    Args:
        needed: largest number of files that the program may have open at a time.

    Returns:
        A warning if the hard limit is below ``needed``, else an empty string.
    """
    hard = raise_open_files()
    if hard != resource.RLIM_INFINITY and hard < needed:
        return f"at most {hard} files may be open, and {needed} are needed"
    return ""


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
