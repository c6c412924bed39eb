"""The executor that a device's configuration asks for.

This module loads neither numpy nor ONNX Runtime, so `shoal-edge config` and `status` can name the executor.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Final

from shoal.errors import ConfigError

AUTO: Final = "auto"
ONNX_RUNTIME: Final = "onnxruntime"
NUMPY: Final = "numpy"
SETTINGS: Final = (AUTO, ONNX_RUNTIME, NUMPY)
"""Values of the setting ``executor``."""


MOST_TRAINER_S: Final = 3600.0
"""A local training of own code that takes longer has hung; the aggregator's deadline for a round often comes first."""
MEMORY_SHARE: Final = 0.75
"""Share of this machine's memory that own training code may take where nobody has set a limit."""
_SPEC: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class TrainerCommand:
    """Own training code and its limits.

    Attributes:
        spec: PACKAGE:CLASS.
        most_s: longest time for one answer, a local training say.
        most_mb: most memory in 2^20 bytes; 0 for MEMORY_SHARE of the machine's.
    """

    spec: str
    most_s: float = MOST_TRAINER_S
    most_mb: int = 0

    def __post_init__(self) -> None:
        if not _SPEC.fullmatch(self.spec):
            raise ConfigError(
                f"{self.spec[:80]!r} names no class", hint="--trainer PACKAGE:CLASS, such as my_trainer:Detector"
            )
        if not self.most_s > 0 or self.most_mb < 0:
            raise ConfigError(
                "a trainer's limits are above 0", hint="trainer_mb 0 takes three quarters of the machine's"
            )

    @property
    def memory_bytes(self) -> int:
        """Most bytes of private memory."""
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.most_mb << 20 if self.most_mb else int(MEMORY_SHARE * machine)


def check_setting(setting: str) -> None:
    """Check a value of the setting.

    Raises:
        ConfigError: it is not in SETTINGS.
    """
    if setting not in SETTINGS:
        raise ConfigError(
            f"executor is {', '.join(SETTINGS[:-1])} or {SETTINGS[-1]}, not {setting!r}",
            hint="auto takes ONNX Runtime if it is installed, else numpy",
        )


def choose(setting: str) -> str:
    """Return ONNX_RUNTIME or NUMPY: for ``auto`` ONNX Runtime if it is installed.

    Raises:
        ConfigError: the setting is not in SETTINGS, or ONNX Runtime is asked for and not installed.
    """
    check_setting(setting)
    if setting == NUMPY:
        return NUMPY
    if _is_installed(ONNX_RUNTIME):
        return ONNX_RUNTIME
    if setting == ONNX_RUNTIME:
        raise ConfigError(
            "executor is onnxruntime, and ONNX Runtime is not installed",
            hint="pip install 'shoal[edge]', or set executor to auto or numpy",
        )
    return NUMPY


def _is_installed(package: str) -> bool:
    """Return whether a package can be found, without loading it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
