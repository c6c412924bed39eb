"""Readers of a fleet page that is served on this machine."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from typing import Final

SCRAPE_S: Final = 1.0
"""A Prometheus asks every 15 s or so; the reader asks oftener, to measure at least what a fleet pays."""
PAGE_TIMEOUT_S: Final = 30.0


@contextlib.contextmanager
def page_reader(port: int) -> Iterator[dict[str, int]]:
    """Read the fleet page inside the block, as one open page and one Prometheus do; yield the number of events and of scrapes.

    Both try again while the server is not there.
    """
    ended, read = threading.Event(), {"events": 0, "metrics": 0}

    def follow(name: str) -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PAGE_TIMEOUT_S)) as connection,
            ):
                connection.request("GET", f"/{name}")
                answer = connection.getresponse()
                if name == "metrics":
                    read[name] += bool(answer.read())
                while not ended.is_set() and (line := answer.readline()):
                    read[name] += line.startswith(b"data: ")
            ended.wait(SCRAPE_S)

    threads = [threading.Thread(target=follow, args=(name,)) for name in read]
    for thread in threads:
        thread.start()
    try:
        yield read
    finally:
        ended.set()
        for thread in threads:
            thread.join()
