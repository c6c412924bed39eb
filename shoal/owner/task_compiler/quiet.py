"""Silence torch's exporter, which would print into the stdout of programs that print data there."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

_LOGGERS = ("torch", "onnxscript", "onnx_ir", "torch.onnx", "torch.export")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence stdout, stderr, warnings and the exporter's loggers inside the block, and restore them afterwards."""
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
    sink = io.StringIO()
    try:
        for logger, _ in levels:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
