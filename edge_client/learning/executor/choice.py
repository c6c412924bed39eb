"""The executor that a device's configuration asks for.

This module loads neither numpy nor ONNX Runtime, so `shoal-edge config` and `status` can name the executor.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from shoal.errors import ConfigError

AUTO: Final = "auto"
ONNX_RUNTIME: Final = "onnxruntime"
NUMPY: Final = "numpy"
SETTINGS: Final = (AUTO, ONNX_RUNTIME, NUMPY)
"""Values of the setting ``executor``."""


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
