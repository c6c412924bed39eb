"""The mask modes by name. A new mode is a module in this package and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from crypto.mask.modes import none, permutation, rotation, signed_permutation
from crypto.mask.modes.base import Mode
from shoal.errors import ConfigError

MODES: Final[Mapping[str, Mode]] = MappingProxyType(
    {mode.name: mode for mode in (none.MODE, permutation.MODE, signed_permutation.MODE, rotation.MODE)}
)


def find(name: str) -> Mode:
    """Return the mode called ``name``.

    Raises:
        ConfigError: no mode has that name.
    """
    try:
        return MODES[name]
    except KeyError:
        raise ConfigError(f"mask mode {name!r} is not known", hint=f"use one of: {', '.join(MODES)}") from None
