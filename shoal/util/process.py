"""Settings of a long-running process: deferred imports, garbage collection, the malloc heap, and traces of native crashes.

Also the limit on its open files, and the number of processor cores that it may use.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

YOUNG_OBJECTS: Final = 5_000
"""Allocated containers before a collection of the youngest generation; Python's default of 700 cost a device 8% of its CPU."""

HEAP_PIECE_BYTES: Final = 4 << 20
"""Blocks up to this size come from the heap: a new mapping costs a page fault every 4 KiB. Vectors of more than a million
coordinates are returned to the system at once: a heap of such holes would take models of memory."""
HEAP_KEPT_BYTES: Final = 32 << 20
"""Free bytes at the heap's end that are not returned to the system, since the next round needs them again."""
DEVICE_HEAP_KEPT_BYTES: Final = 4 << 20
"""The same for a device, whose memory counts more than its time."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


class _Deferred(ModuleType):
    """A placeholder that loads the module at the first attribute access.

    The standard library's LazyLoader does not work here: an import statement alone already loads a deferred submodule.
    """

    def __getattr__(self, attribute: str) -> Any:
        # Removed first, or import_module would return this placeholder.
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def put_off(name: str) -> bool:
    """Load the module ``name`` at its first use instead of its first import.

    Returns:
        False if the module is loaded already or does not exist.
    """
    if name in sys.modules:
        return False
    spec = importlib.util.find_spec(name)
    if spec is None:
        return False
    module = _Deferred(name)
    module.__spec__ = spec
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    # `import a.b` sets the attribute of `a` only if it loads `b` itself, and here `b` is in sys.modules already.
    if parent:
        setattr(importlib.import_module(parent), leaf, module)
    return True


def leave_out(name: str) -> None:
    """Let later imports of the module ``name`` fail as if it were not installed, unless it is loaded already."""
    if name not in sys.modules:
        sys.modules[name] = None  # type: ignore[assignment]


def trace_crashes() -> None:
    """Print the running functions of all threads, without values, if native code ends the process."""
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or no file
        faulthandler.enable()


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage in the body: imports make many objects and hardly any garbage, and collections take a tenth of them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle() -> None:
    """Exempt all current objects from garbage collection, and collect newer ones less often (YOUNG_OBJECTS)."""
    # Dead cycles would otherwise be frozen too, and never be freed.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def keep_heap() -> bool:
    """Stop malloc from returning freed memory to the system, for a server that needs the same megabytes every round.

    Returns:
        False if the C library is not glibc, or the environment sets MALLOC_... variables. The program then works with
        malloc's defaults and takes more CPU time.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    return _set_malloc((_M_MMAP_THRESHOLD, HEAP_PIECE_BYTES), (_M_TRIM_THRESHOLD, HEAP_KEPT_BYTES))


def small_heap() -> bool:
    """Let all threads that start from now on share the first one's malloc arena, and malloc return large vectors at once.

    Returns:
        False if the C library is not glibc.
    """
    return _set_malloc(
        (_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, HEAP_PIECE_BYTES), (_M_TRIM_THRESHOLD, DEVICE_HEAP_KEPT_BYTES)
    )


def _set_malloc(*settings: tuple[int, int]) -> bool:
    """Give glibc's malloc each setting (parameter, value); return whether it took all, False with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [bool(mallopt(*setting)) for setting in settings]
    return all(taken)


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
