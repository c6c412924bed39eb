"""Import ONNX Runtime with its telemetry off. No other module imports ONNX Runtime directly."""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

VARIABLE: Final = "ORT_DISABLE_TELEMETRY"
"""ONNX Runtime reads this at import. Without it, it writes a device identifier and a database below ~/.cache/Microsoft."""
OFF: Final = "1"


def switch_off() -> None:
    """Switch ONNX Runtime's telemetry off in this process and its children, overriding the environment."""
    os.environ[VARIABLE] = OFF


def import_onnxruntime() -> Any:
    """Return the package ``onnxruntime``, imported with its telemetry off.

    Raises:
        ImportError: ONNX Runtime is not installed.
    """
    switch_off()
    return importlib.import_module("onnxruntime")
