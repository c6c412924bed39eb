"""The amqtt broker on loopback, as a script that shoal/transport/local_broker.py runs.

It imports no module of Shoal, since it is started by path with ``python -P`` and may not find our packages.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


async def _serve(port: int) -> None:
    from amqtt.broker import Broker

    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
    )
    await broker.start()
    await asyncio.Event().wait()


def main() -> None:
    """Serve on the port in argv[1] until killed, or until the parent, process argv[2], ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before prctl, in which case no signal follows.
    if os.getppid() != int(sys.argv[2]):
        sys.exit("the parent is gone already")
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
