"""A reader of the fleet page for the bench: one open page, and one Prometheus that scrapes every second."""

from __future__ import annotations

import contextlib
import http.client
import threading
from types import TracebackType
from typing import Final, Self

SCRAPE_S: Final = 1.0
"""A Prometheus asks every 15 s or so; the bench asks oftener, to measure at least what a fleet pays."""
TIMEOUT_S: Final = 30.0


class PageReader:
    """Follows ``/events`` and scrapes ``/metrics`` until it is closed; tries again while the server is not there.

    Args:
        port: of the page on this machine.

    Attributes:
        events, scrapes: number of events and of scrapes so far.
    """

    def __init__(self, port: int) -> None:
        self.events = self.scrapes = 0
        self._port = port
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._again, args=(read,)) for read in (self._follow, self._scrape)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _again(self, read: object) -> None:
        assert callable(read)
        while not self._ended.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                read()
            self._ended.wait(SCRAPE_S)

    def _follow(self) -> None:
        with contextlib.closing(self._ask("/events")) as connection:
            answer = connection.getresponse()
            while not self._ended.is_set() and (line := answer.readline()):
                self.events += line.startswith(b"data: ")

    def _scrape(self) -> None:
        with contextlib.closing(self._ask("/metrics")) as connection:
            self.scrapes += bool(connection.getresponse().read())

    def _ask(self, path: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        connection.request("GET", path)
        return connection
