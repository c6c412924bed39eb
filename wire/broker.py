"""Start a broker of our own on loopback, as its own process: mosquitto where it is installed, amqtt otherwise.

For the demo, trials and tests; a fleet in earnest runs its broker with TLS and an ACL (deploy/mosquitto). The broker can't
outlive us: the kernel signals it when the thread that started it ends, so that thread is kept for the broker's whole life.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self, cast

from wire import limits
from wire.errors import BrokerUnreachableError, ConfigError

BrokerKind = Literal["mosquitto", "amqtt"]

START_S: Final = 15.0
"""A broker whose port does not answer by then has failed; amqtt needs 1 s, mosquitto 0.02 s."""

STOP_S: Final = 5.0
"""A broker that has not stopped by then is killed."""

PORT_TRIES: Final = 3
"""A free port may be taken between finding and using it: so many are tried."""

LOG_TAIL_CHARS: Final = 2000

_SYSTEM_FOLDERS: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")

_HEAP: Final = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Bytes. By default glibc hands every model that the broker has passed on back to the system and asks for it again."""

_LAUNCH: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('the parent is gone already'); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Asks for SIGTERM at the parent's death, then becomes the program; no Python code runs between fork and exec."""


class QueueLimits(NamedTuple):
    """Limits of mosquitto for the messages that wait for one client: their number, their bytes, and those in flight."""

    messages: int = 100_000
    bytes: int = limits.MAX_TRANSFER_BYTES
    inflight: int = 100


CONTROL_MESSAGES: Final = 8
"""Presences, reminders and declines that one device may have waiting for the aggregator, beside its upload."""

CONTROL_MESSAGE_BYTES: Final = 4096
"""Upper bound of the memory that mosquitto counts for one of them."""

ROUNDS_WAITING: Final = 2
"""Uploads of one round may still wait while those of the next arrive."""


def queue_limits(devices: int, upload_bytes: int) -> QueueLimits:
    """Return queue limits under which the broker drops nothing while the aggregator is busy or away.

    mosquitto drops messages above its limits without a word. Small fleets get the defaults of `QueueLimits`.

    Args:
        devices: size of the roster.
        upload_bytes: size of one sealed update.
    """
    chunks = -(-upload_bytes // limits.CHUNK_BYTES)
    messages = ROUNDS_WAITING * devices * (chunks + CONTROL_MESSAGES)
    waiting_bytes = ROUNDS_WAITING * devices * (upload_bytes + CONTROL_MESSAGES * CONTROL_MESSAGE_BYTES)
    least = QueueLimits()
    return QueueLimits(max(least.messages, messages), max(least.bytes, waiting_bytes), least.inflight)


def mosquitto_config(port: int, directory: Path, queue: QueueLimits = QueueLimits()) -> str:  # noqa: B008 - a constant
    """Return mosquitto's configuration for a loopback listener with persistence in ``directory``."""
    lines = [
        f"listener {port} 127.0.0.1",
        "allow_anonymous true",
        "set_tcp_nodelay true",
        f"max_inflight_messages {queue.inflight}",
        f"max_queued_messages {queue.messages}",
        f"max_queued_bytes {queue.bytes}",
        f"max_packet_size {limits.MAX_PACKET_BYTES}",
        "persistence true",
        f"persistence_location {directory}/",
        "autosave_interval 5",
        "log_type error",
        "log_type warning",
        "log_dest stderr",
    ]
    if os.geteuid() == 0:
        lines.append("user root")
    return "\n".join(lines) + "\n"


def find_mosquitto() -> str | None:
    """Return the path of the mosquitto broker, looking where distributions hide it from users; None without one."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS))
    return shutil.which("mosquitto", path=path)


def choose_kind(kind: str) -> BrokerKind:
    """Return the broker to start for ``auto``, ``mosquitto`` or ``amqtt``.

    Raises:
        ConfigError: the kind is not known.
        BrokerUnreachableError: that broker, or any, is not installed.
    """
    if kind not in ("auto", "mosquitto", "amqtt"):
        raise ConfigError(f"broker {kind!r} is not known", hint="use auto, mosquitto or amqtt")
    if kind in ("auto", "mosquitto") and find_mosquitto() is not None:
        return "mosquitto"
    if kind in ("auto", "amqtt") and importlib.util.find_spec("amqtt") is not None:
        return "amqtt"
    hint = {
        "mosquitto": "install it (apt install mosquitto) or use amqtt",
        "amqtt": "install it (pip install amqtt) or use mosquitto",
        "auto": "install one: apt install mosquitto, or pip install amqtt",
    }
    raise BrokerUnreachableError(f"no {'broker' if kind == 'auto' else kind} is installed", hint=hint[kind])


class BrokerProcess:
    """A broker that runs as our child; a context manager that stops it.

    Attributes:
        kind: which broker it is.
        port: its TCP port on 127.0.0.1, the same after every restart.
        url: what clients connect to.
        log_file: what it complained about.
    """

    def __init__(self, kind: BrokerKind, directory: Path, port: int, queue: QueueLimits | None = None) -> None:
        self._queue = queue or QueueLimits()
        self.kind = kind
        self.port = port
        self.url = f"mqtt://127.0.0.1:{port}"
        self.log_file = directory / f"{kind}.log"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._release = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Its process id; 0 when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def keeps_state(self) -> bool:
        """Whether retained messages and sessions survive ``restart``: amqtt forgets them."""
        return self.kind == "mosquitto"

    def start(self) -> None:
        """Start it and return when its port answers.

        Raises:
            BrokerUnreachableError: the port is taken, or it ended or did not answer in START_S; the message holds the
                end of its log.
        """
        if self.pid:
            return
        if _answers(self.port):
            raise BrokerUnreachableError(
                f"port {self.port} is in use by another program", hint="choose another port, or 0 for a free one"
            )
        self._process = self._spawn(self._command())
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and self._process.poll() is None:
            if _answers(self.port):
                return
            time.sleep(0.01)
        ended = self._process.poll()
        self.kill()
        what = f"ended with status {ended}" if ended is not None else f"did not answer in {START_S:g} s"
        raise BrokerUnreachableError(
            f"{self.kind} {what} on port {self.port}: {self._log_tail()}", hint=f"see {self.log_file}"
        )

    def stop(self) -> None:
        """End it in good order, or kill it after STOP_S."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop it if it runs and start it on the same port, with what it persisted (see ``keeps_state``).

        Raises:
            BrokerUnreachableError: it did not start again.
        """
        self.stop()
        self.start()

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._release.set()

    def _command(self) -> Sequence[str]:
        if self.kind == "amqtt":
            script = Path(__file__).with_name("amqtt_server.py")
            return (sys.executable, "-P", str(script), str(self.port), str(os.getpid()))
        binary = find_mosquitto()
        if binary is None:
            raise BrokerUnreachableError("mosquitto is no longer installed")
        config = self._directory / "mosquitto.conf"
        config.write_text(mosquitto_config(self.port, self._directory, self._queue))
        return (sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), binary, "-c", str(config))

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start ``command`` from a thread that lives as long as the broker: PR_SET_PDEATHSIG follows the thread."""
        self._release = release = threading.Event()
        born: Future[subprocess.Popen[bytes]] = Future()

        def keep() -> None:
            try:
                with self.log_file.open("ab") as log:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        env={**_HEAP, **os.environ},
                    )
            except OSError as error:
                born.set_exception(error)
                return
            born.set_result(process)
            release.wait()

        threading.Thread(target=keep, name=f"{self.kind}-{self.port}", daemon=True).start()
        try:
            return born.result()
        except OSError as error:
            raise BrokerUnreachableError(f"{self.kind} can't be started: {error}") from error

    def _log_tail(self) -> str:
        text = self.log_file.read_text(errors="replace").strip()
        return text[-LOG_TAIL_CHARS:] or "its log is empty"


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast("int", probe.getsockname()[1])


def start_broker(kind: str, directory: Path, port: int = 0, queue: QueueLimits | None = None) -> BrokerProcess:
    """Start a broker that only this machine can reach, and return when it answers.

    Args:
        kind: ``mosquitto``, ``amqtt``, or ``auto`` for the first of them that is installed.
        directory: for its configuration, log and persisted state; made if missing.
        port: TCP port on 127.0.0.1; 0 for any free one.
        queue: limits for mosquitto; by default those of a small fleet.

    Raises:
        BrokerUnreachableError: none is installed, or it did not start.
    """
    chosen = choose_kind(kind)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for tries_left in reversed(range(1 if port else PORT_TRIES)):
        broker = BrokerProcess(chosen, directory, port or free_port(), queue)
        try:
            broker.start()
        except BrokerUnreachableError:
            if not tries_left:
                raise
        else:
            return broker
    raise AssertionError("unreachable: the last try raises or returns")
