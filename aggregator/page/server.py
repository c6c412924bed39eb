"""The HTTP server of the fleet page: the standard library's, with bounds on all that a client can take.

connections       at most MOST_CONNECTIONS, each in a thread of its own; further ones are closed at once
event streams     at most MOST_STREAMS of them
a request's head  at most HEAD_BYTES, within HEAD_S
an answer         WRITE_S for a client that does not read; a connection has one request
methods           GET and HEAD; a body is not read

The daemon starts, feeds and ends it as a `FleetPage`.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aggregator.page.access import Access, Listen
from aggregator.page.feed import UPDATE_S, Feed, Snapshot
from aggregator.page.home_assistant import HomeAssistant
from aggregator.status.record import Facts
from aggregator.storage.signed_runs import directory_of
from shoal.errors import ConfigError, ShoalError, reason_of
from shoal.page.page import content_security_policy, data_of, live, still

if TYPE_CHECKING:
    from aggregator.config import AggregatorConfig
    from aggregator.membership import AggregatorMembership
    from aggregator.page.metrics import Metrics
    from aggregator.status.facts import LiveFacts
    from shoal.protocol.documents import RunPlan
    from shoal.transport.base import Transport

LOG = logging.getLogger("shoal.aggregator")
MOST_CONNECTIONS: Final = 32
MOST_STREAMS: Final = 8
HEAD_BYTES: Final = 16 << 10
HEAD_S: Final = 5.0
WRITE_S: Final = 10.0
POLL_S: Final = 0.25
"""Interval at which the server looks whether it is to end."""
HEARTBEAT_S: Final = 15.0
"""Time without an event after which a stream sends a comment, so that a dead connection is noticed."""
TRY_AGAIN_S: Final = 5
"""After this many seconds a client that found too many streams may try again."""
FIXED_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Connection": "close",
}
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
"""Answered without a token: they say a state in one line, for the programs that watch services."""


class PageServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves the fleet page until `close`.

    Args:
        access: where to listen, and who may ask.
        feed: the state of the fleet.
        metrics: the same for `/metrics`.

    Raises:
        ConfigError: the address can't be listened on.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, access: Access, feed: Feed, metrics: Metrics) -> None:
        self.access, self.feed, self.metrics = access, feed, metrics
        self.closing = threading.Event()
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in access.listen.host else socket.AF_INET
        try:
            super().__init__((access.listen.host, access.listen.port), _Handler)
        except OSError as error:
            reason = error.strerror or "no such address"
            raise ConfigError(
                f"can't listen on {access.listen}: {reason}",
                hint="another program may use it: give another port to --http",
            ) from error
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_S,), name="fleet-page", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The page's address on this machine."""
        return f"http://{Listen(self.access.listen.host, self.port)}/"

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end the streams."""
        self.closing.set()
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless there are too many."""
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._connections.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed answer; a client that went away is none."""
        del request, client_address
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            LOG.error("the fleet page failed to answer", exc_info=error)


class _Head(io.RawIOBase):
    """The first HEAD_BYTES of a connection, readable for HEAD_S; then an error."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = HEAD_BYTES
        self._end_s = time.monotonic() + HEAD_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        if not self._left:
            raise ConnectionAbortedError("the head of a request is too long")
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "shoal"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Head(self.connection), 1 << 10)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Log nothing: what a client sends is not worth a line, and may hold a secret."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with a line of text; the library's page would repeat parts of the request."""
        del message, explain
        self.close_connection = True
        self._answer(HTTPStatus(code), f"{HTTPStatus(code).phrase}\n".encode())

    def do_HEAD(self) -> None:
        """Answer as for GET, without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer a request for one of the paths."""
        self.close_connection = True
        self.connection.settimeout(WRITE_S)
        path = self.path.partition("?")[0]
        access = self.server.access
        if not access.admits_host(self.headers.get("Host", "")):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"This server answers to loopback names only.\n")
        elif path not in OPEN_PATHS and not access.admits(self.headers.get("Authorization", "")):
            challenge = {"WWW-Authenticate": 'Basic realm="Shoal: the token is the password", charset="UTF-8"'}
            self._answer(HTTPStatus.UNAUTHORIZED, b"The token is missing or wrong.\n", **challenge)
        else:
            answer = ROUTES.get(path, _Handler._unknown)
            answer(self)

    def _unknown(self) -> None:
        self._answer(HTTPStatus.NOT_FOUND, b"There is no such page.\n")

    def _health(self) -> None:
        self._answer(HTTPStatus.OK, b"ok\n")

    def _ready(self) -> None:
        reason = self.server.feed.not_ready
        status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
        self._answer(status, f"{reason or 'ready'}\n".encode())

    def _metrics(self) -> None:
        self._answer(HTTPStatus.OK, self.server.metrics.text(), self.server.metrics.content_type)

    def _page(self) -> None:
        policy = content_security_policy(connect=True)
        self._with_snapshot(lambda s: live(self._title, _data(self._title, s)), **{"Content-Security-Policy": policy})

    def _report(self) -> None:
        name = f'attachment; filename="{self._title}.html"'
        self._with_snapshot(
            lambda s: still(self._title, (*s.runs, *s.earlier), s.status.document(), now_s=s.made_at_s),
            **{"Content-Disposition": name},
        )

    @property
    def _title(self) -> str:
        return self.server.feed.fleet

    def _with_snapshot(self, make: Callable[[Snapshot], bytes], **headers: str) -> None:
        snapshot = self.server.feed.current()
        if snapshot is None:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"The aggregator has just started.\n")
        else:
            self._answer(HTTPStatus.OK, make(snapshot), "text/html; charset=utf-8", **headers)

    def _answer(
        self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8", **headers: str
    ) -> None:
        self._begin(status, kind, {"Content-Length": str(len(content)), **headers})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: HTTPStatus, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**FIXED_HEADERS, "Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _events(self) -> None:
        if self.command == "HEAD":
            self._begin(HTTPStatus.OK, "text/event-stream", {})
        elif self.server.streams.acquire(blocking=False):
            try:
                self._begin(HTTPStatus.OK, "text/event-stream", {})
                self._stream()
            finally:
                self.server.streams.release()
        else:
            again = {"Retry-After": str(TRY_AGAIN_S)}
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"Too many pages follow this fleet already.\n", **again)

    def _stream(self) -> None:
        """Send an event for each change, at most one in UPDATE_S."""
        status, runs, sent_s = -1, -1, time.monotonic()
        self.wfile.write(f"retry: {1000 * TRY_AGAIN_S}\n\n".encode())
        while not self.server.closing.is_set():
            snapshot = self.server.feed.current()
            now_s = time.monotonic()
            if snapshot is not None and (snapshot.status_serial, snapshot.runs_serial) != (status, runs):
                data = snapshot.event(runs=snapshot.runs_serial != runs)
                status, runs, sent_s = snapshot.status_serial, snapshot.runs_serial, now_s
                self.wfile.write(f"event: fleet\ndata: {data}\n\n".encode())
            elif now_s - sent_s >= HEARTBEAT_S:
                sent_s = now_s
                self.wfile.write(b": alive\n\n")
            if self._left():
                return

    def _left(self) -> bool:
        """Wait UPDATE_S, and return whether the client has closed the connection; its place is free at once then."""
        readable, _, _ = select.select([self.connection], [], [], UPDATE_S)
        return bool(readable)  # a client has nothing to say any more but its end


def _data(title: str, snapshot: Snapshot) -> dict[str, Any]:
    runs = (*snapshot.runs, *snapshot.earlier)
    return data_of(title, runs, snapshot.status.document(), note=snapshot.trouble, now_s=snapshot.made_at_s)


ROUTES: Final[dict[str, Callable[[_Handler], None]]] = {
    "/": _Handler._page,
    "/events": _Handler._events,
    "/report.html": _Handler._report,
    "/metrics": _Handler._metrics,
    "/healthz": _Handler._health,
    "/readyz": _Handler._ready,
}


class FleetPage:
    """The HTTP server and Home Assistant's sensors, if they are configured; without both it does nothing.

    Args:
        config: the aggregator's configuration.
        membership: the aggregator's, which has the roster.
        transport: its connection to the broker.

    Raises:
        ConfigError: an address, token or prefix is wrong, the address is taken, or prometheus-client is missing.
    """

    def __init__(self, config: AggregatorConfig, membership: AggregatorMembership, transport: Transport) -> None:
        self._membership = membership
        self.feed = Feed(membership.fleet, membership.directory, lambda run: directory_of(membership, run))
        self._sensors = (
            HomeAssistant(transport, membership.fleet, config.home_assistant) if config.home_assistant else None
        )
        self.server = _server(config.http, config.http_token, self.feed) if config.http else None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._published_s = -math.inf

    def start(self) -> None:
        """Listen, and publish to Home Assistant, in threads of their own."""
        if self.server is not None:
            self.server.start()
            LOG.info("fleet page", extra={"kv": {"address": self.server.url}})
        if self._sensors is not None:
            self._thread = threading.Thread(target=self._publish_sensors, args=(self._sensors,), daemon=True)
            self._thread.start()

    def keep_up(self, facts: Callable[[], LiveFacts], plan: Callable[[], RunPlan | None], now_s: float) -> None:
        """Hand the facts over if that is due; called by the daemon's loop.

        Args:
            facts: returns the facts of the daemon.
            plan: returns the plan of the run that is served.
            now_s: monotonic seconds.
        """
        if (self.server is None and self._sensors is None) or now_s - self._published_s < UPDATE_S:
            return
        self._published_s = now_s
        roster, at_s = self._membership.roster, int(time.time())
        live = dataclasses.replace(facts(), alive_at_s=at_s)
        known = Facts(
            fleet=self._membership.fleet,
            running=True,
            live=live,
            broker=live.connection.broker,
            active=roster.active(),
            revoked=tuple(roster.revoked),
            labels=roster.labelled,
            expires={**live.connection.expires, "roster": roster.expires_at_s},
            now_s=at_s,
        )
        self.feed.publish(known, plan())

    def close(self) -> None:
        """End all threads."""
        self._ended.set()
        if self.server is not None:
            self.server.close()
        if self._thread is not None:
            self._thread.join()

    def _publish_sensors(self, sensors: HomeAssistant) -> None:
        failed = False
        while not self._ended.wait(UPDATE_S):
            try:
                snapshot = self.feed.current()
                if snapshot is not None and snapshot.status.connected:
                    sensors.publish(snapshot, time.monotonic())
                failed = False
            except ShoalError as error:
                if not failed:
                    LOG.warning(
                        "Home Assistant's sensors can't be published", extra={"kv": {"reason": reason_of(error)}}
                    )
                failed = True


def _server(address: str, token_file: Path | None, feed: Feed) -> PageServer:
    access = Access.load(Listen.parse(address), token_file)
    try:
        from aggregator.page.metrics import Metrics
    except ImportError as error:
        raise ConfigError(
            "the fleet page needs prometheus-client", hint="install it with: pip install 'shoal[aggregator]'"
        ) from error
    if not access.listen.is_loopback:
        LOG.warning(
            "the fleet page is open to other machines, without TLS",
            extra={
                "kv": {"address": str(access.listen), "hint": "a proxy with TLS in front, or ssh -L, hides the token"}
            },
        )
    return PageServer(access, feed, Metrics(feed))
