"""Imports that can wait: a module that a library names but a program never uses need not be in memory."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


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
