"""Load ONNX Runtime with its telemetry off: the only way in which this package loads it."""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

VARIABLE: Final = "ORT_DISABLE_TELEMETRY"
"""ONNX Runtime reads it while it is imported. Otherwise it writes a device identifier and a database below ~/.cache/Microsoft."""
OFF: Final = "1"


def switch_off() -> None:
    """Switch ONNX Runtime's telemetry off in this process and those that it starts, whatever the environment said before."""
    os.environ[VARIABLE] = OFF


def import_onnxruntime() -> Any:
    """Return the package ``onnxruntime``, imported with its telemetry off.

    Raises:
        ImportError: it is not installed.
    """
    switch_off()
    return importlib.import_module("onnxruntime")
