"""Serve a device, in a process that runs for months: with few libraries, and one malloc arena for all threads."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Final

from shoal.util.console import say_json, setup_logging
from shoal.util.process import leave_out, no_collection, put_off, small_heap, trace_crashes

if TYPE_CHECKING:
    from edge_client.config import EdgeConfig

UNUSED: Final = ("urllib.request", "hashlib", "ssl")
"""Imported by paho: the first two for web sockets, ssl for TLS, for which it is loaded.

urllib.request would take 3 MB with http and email. hashlib and ssl load an OpenSSL, which takes 5 MB beside that of
the package cryptography; `shoal.digests` uses the latter.
"""
MISSING: Final = ("socks", "_hashlib")
"""Modules that their importers can do without. paho takes PySocks, if it is installed, for proxies, which a device does not have;
PySocks would load urllib.request. hmac takes hashlib's OpenSSL, if it is there, also to compare bytes.
"""
MALLOC: Final = {"MALLOC_ARENA_MAX": "1"}
"""One malloc arena for all threads: they take turns anyway, and each further arena holds free pages of its own."""
_PR_SET_NAME: Final = 15
_PROCESS_NAME: Final = b"shoal-edge"


def serve_and_report(config: EdgeConfig, *, as_json: bool) -> None:
    """Serve with ``config`` until stopped; with ``as_json`` print the runs that have ended, as one JSON object.

    numpy must not be loaded yet: see `prepare`.
    """
    prepare(config)
    setup_logging(config.log)
    trace_crashes()
    for name in MISSING:
        leave_out(name)
    for name in UNUSED:
        put_off(name)  # before the import below, which loads paho
    with no_collection():
        from edge_client.daemon import serve

    serve(config)
    if as_json:
        from edge_client.storage.state import DeviceState

        figures = DeviceState(config.dir).load_status() or {}
        say_json({name: figures.get(name) for name in ("device", "fleet", "ended")})


def prepare(config: EdgeConfig) -> None:
    """Give this process the environment, malloc setting and name of a device.

    It has to come before numpy is loaded, whose BLAS reads its number of threads then, and before the first thread.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(config.threads))
    os.environ.update({**MALLOC, **threads})
    small_heap()
    # Tools like top and ps would otherwise show the interpreter's name.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _PROCESS_NAME, 0, 0, 0)
