"""The process that `shoal-edge run` becomes: everything that a device holds in memory while it serves."""

from __future__ import annotations

import sys
from typing import Final

from edge_client.reexec import inherited_config
from shoal.util.console import run_program, setup_logging
from shoal.util.process import put_off

UNUSED: Final = "urllib.request"
"""paho names it for web socket proxies; with http and email behind it, it is 3 MB of the 80 MB that a device may hold."""


def main() -> None:
    """Serve with the configuration that `become` left for this process."""

    def program(**_: object) -> None:
        config = inherited_config(sys.argv)
        setup_logging(config.log)
        put_off(UNUSED)
        from edge_client.daemon import serve

        serve(config)

    run_program(program, prog="shoal-edge", secret=True)


if __name__ == "__main__":
    main()
