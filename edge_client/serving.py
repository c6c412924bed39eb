"""Entry point of the process that serves a device; `shoal-edge run` replaces itself by it to save memory."""

from __future__ import annotations

import sys
from typing import Final

from edge_client.reexec import AS_JSON, inherited_config
from shoal.util.console import run_program, say_json, setup_logging
from shoal.util.process import leave_out, no_collection, put_off, trace_crashes

UNUSED: Final = "urllib.request"
"""Imported by paho for web socket proxies. With http and email it would take 3 MB of the 80 MB that a device may use."""
PROXIES: Final = "socks"
"""PySocks, which paho uses if it is installed, and which loads UNUSED. A device connects without a proxy."""


def main() -> None:
    """Serve with the configuration that `become` has passed to this process."""

    def program(**_: object) -> None:
        config = inherited_config(sys.argv)
        setup_logging(config.log)
        trace_crashes()
        leave_out(PROXIES)
        put_off(UNUSED)  # before the import below, which loads paho
        with no_collection():
            from edge_client.daemon import serve

        serve(config)
        if AS_JSON in sys.argv:
            from edge_client.storage.state import DeviceState

            figures = DeviceState(config.dir).load_status() or {}
            say_json({name: figures.get(name) for name in ("device", "fleet", "ended")})

    run_program(program, prog="shoal-edge", secret=True)


if __name__ == "__main__":
    main()
