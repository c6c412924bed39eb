"""Settings of a long-running process: deferred imports, garbage collection, the malloc heap, and traces of native crashes."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Final

YOUNG_OBJECTS: Final = 5_000
"""Allocated containers before a collection of the youngest generation; Python's default of 700 cost a device 8% of its CPU."""

HEAP_PIECE_BYTES: Final = 4 << 20
"""Blocks up to this size come from the heap: a new mapping costs a page fault every 4 KiB. Vectors of more than a million
coordinates are returned to the system at once: a heap of such holes would take models of memory."""
DEVICE_HEAP_KEPT_BYTES: Final = 8 << 20
"""Free bytes at the end of a device's heap that are not returned to the system: as many as deriving a mask of 159,010 coordinates
takes. With 4 MB a round cost 600 page faults, a twentieth of its CPU time; the peak is the same."""
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
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


def small_heap() -> bool:
    """Let all threads that start from now on share the first one's malloc arena, and malloc return large vectors at once.

    Returns:
        False if the C library is not glibc.
    """
    return set_malloc(
        (_M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, HEAP_PIECE_BYTES), (M_TRIM_THRESHOLD, DEVICE_HEAP_KEPT_BYTES)
    )


def set_malloc(*settings: tuple[int, int]) -> bool:
    """Give glibc's malloc each setting (parameter, value); return whether it took all, False with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [bool(mallopt(*setting)) for setting in settings]
    return all(taken)
