"""Serve a device, in the process that `shoal-edge run` replaces itself by to save memory, or in that of `edge_client.program`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from edge_client.reexec import AS_JSON, inherited_config
from shoal.util.console import run_program, say_json, setup_logging
from shoal.util.process import leave_out, no_collection, put_off, trace_crashes

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


def main() -> None:
    """Serve with the configuration that `become` has passed to this process."""

    def program(**_: object) -> None:
        serve_and_report(inherited_config(sys.argv), as_json=AS_JSON in sys.argv)

    run_program(program, prog="shoal-edge", secret=True)


def serve_and_report(config: EdgeConfig, *, as_json: bool) -> None:
    """Serve with ``config`` until stopped; with ``as_json`` print the runs that have ended, as one JSON object.

    The environment has to be `become`'s or `prepare`'s, and numpy not loaded yet.
    """
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


if __name__ == "__main__":
    main()
