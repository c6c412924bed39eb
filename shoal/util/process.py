"""Programs that take little: imports that can wait, a garbage collector that leaves what stays alone, a heap that stays."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, Final

YOUNG_OBJECTS: Final = 5_000
"""Containers made before the collector looks at the young ones; Python's own 700 cost a device 8% of its processor time."""

HEAP_PIECE_BYTES: Final = 32 << 20
"""Up to this size memory comes from the heap, glibc's most on 64 bits: a fresh mapping pays a page fault for every 4 KiB."""
HEAP_KEPT_BYTES: Final = 64 << 20
"""Free bytes at the heap's end that a program keeps for its next round instead of handing them back and asking again."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


class _Deferred(ModuleType):
    """Stands for a module until somebody asks it for anything.

    The standard library's LazyLoader does not do: an import statement alone already loads what it has put off.
    """

    def __getattr__(self, attribute: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def put_off(name: str) -> bool:
    """Have the module ``name`` loaded at its first use instead of its first import.

    Returns:
        False where it is loaded already, or does not exist.
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
    if parent:
        setattr(importlib.import_module(parent), leaf, module)
    return True


def settle() -> None:
    """Tell the garbage collector that everything alive now will stay: a later pass looks at younger objects only."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def keep_heap() -> bool:
    """Keep freed memory for a server that takes and frees the same megabytes every round (glibc only).

    Returns:
        False where the C library takes no such setting, or the environment has its own (MALLOC_...): everything works, at
        more processor time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    settings = ((_M_MMAP_THRESHOLD, HEAP_PIECE_BYTES), (_M_TRIM_THRESHOLD, HEAP_KEPT_BYTES))
    taken = [bool(mallopt(*setting)) for setting in settings]
    return all(taken)
