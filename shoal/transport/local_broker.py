"""Start a broker process on loopback: mosquitto if it is installed, else amqtt.

For the demo, trials and tests; a real fleet runs its broker with TLS and an ACL (deploy/mosquitto). The broker ends with
this program: the kernel signals it when the thread that started it ends, and that thread runs as long as the broker.

Example: ``with start_broker("auto", directory) as broker:`` serves at ``broker.url`` inside the block.
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

from shoal import limits
from shoal.errors import BrokerUnreachableError, ConfigError

BrokerKind = Literal["mosquitto", "amqtt"]

START_S: Final = 15.0
"""Longest time until a started broker's port answers; amqtt needs 1 s, mosquitto 0.02 s."""

STOP_S: Final = 5.0
"""Time after which a broker that does not stop is killed."""

PORT_TRIES: Final = 3
"""Ports to try, since another program may take a free port before the broker does."""

LOG_TAIL_CHARS: Final = 2000

_SYSTEM_FOLDERS: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")

_HEAP: Final = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Bytes. By default glibc returns the memory of every forwarded model to the system and requests it again for the next."""

_LAUNCH: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('the parent is gone already'); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Requests SIGTERM at the parent's death, then executes the broker; used in place of ``preexec_fn``, which is not safe with
threads."""


COPIES_QUEUED: Final = 2
"""Copies of each device's upload that fit the aggregator's queue: the chunks sent first, and a retransmission requested while
those were still queued."""

NOTES_QUEUED: Final = limits.REMINDERS_SOON + int(limits.SESSION_EXPIRY_AGGREGATOR_S / limits.REMIND_LATE_CAP_S) + 4
"""Short messages of a device that fit the aggregator's queue: presences, declines, and the reminders sent while the broker
stores an offline aggregator's session."""

NOTE_BYTES: Final = 1024
HEAD_BYTES: Final = 4096
"""Upper bound of an upload's seal, header and chunk headers."""

MIN_QUEUED_MESSAGES: Final = 100_000
MIN_QUEUED_BYTES: Final = limits.MAX_TRANSFER_BYTES
INFLIGHT_MESSAGES: Final = 100


class QueueLimits(NamedTuple):
    """Limits of mosquitto's queue for each client, above which it silently drops messages.

    Attributes:
        messages: most messages at QoS 1 besides those in flight.
        payload_bytes: most bytes of all messages at QoS 1, those in flight included.
        inflight: most messages that a client has not acknowledged.
    """

    messages: int
    payload_bytes: int
    inflight: int

    def lines(self) -> list[str]:
        """Return the lines of mosquitto's configuration."""
        return [
            f"max_queued_messages {self.messages}",
            f"max_queued_bytes {self.payload_bytes}",
            f"max_inflight_messages {self.inflight}",
        ]


def queue_limits(devices: int, upload_bytes: int) -> QueueLimits:
    """Return limits under which mosquitto drops no message of a fleet.

    The longest queue is the aggregator's: while it is offline or busy, all uploads of a round are queued there.

    Args:
        devices: number of devices in the fleet.
        upload_bytes: size of one upload, 4 bytes for each coordinate of the model.
    """
    size = upload_bytes + HEAD_BYTES
    chunks = -(-size // limits.CHUNK_BYTES)
    messages = devices * (COPIES_QUEUED * chunks + NOTES_QUEUED)
    payload_bytes = devices * (COPIES_QUEUED * size + NOTES_QUEUED * NOTE_BYTES)
    return QueueLimits(max(MIN_QUEUED_MESSAGES, messages), max(MIN_QUEUED_BYTES, payload_bytes), INFLIGHT_MESSAGES)


SMALL_FLEET: Final = queue_limits(devices=100, upload_bytes=1 << 20)


def mosquitto_config(port: int, directory: Path, queue: QueueLimits = SMALL_FLEET) -> str:
    """Return mosquitto's configuration for a loopback listener with persistence in ``directory``."""
    lines = [
        f"listener {port} 127.0.0.1",
        "allow_anonymous true",
        # Nagle's algorithm would delay every small message.
        "set_tcp_nodelay true",
        *queue.lines(),
        f"max_packet_size {limits.MAX_PACKET_BYTES}",
        "persistence true",
        f"persistence_location {directory}/",
        # A killed mosquitto loses what it has not saved; its default is every 30 minutes.
        "autosave_interval 5",
        "log_type error",
        "log_type warning",
        "log_dest stderr",
    ]
    # Started by root, mosquitto would change to the user mosquitto, who can't write to our directory.
    if os.geteuid() == 0:
        lines.append("user root")
    return "\n".join(lines) + "\n"


def find_mosquitto() -> str | None:
    """Return the path of mosquitto, from PATH or the folders of system programs; None if it is not installed."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS))
    return shutil.which("mosquitto", path=path)


def choose_kind(kind: str) -> BrokerKind:
    """Return the broker to start for ``auto``, ``mosquitto`` or ``amqtt``.

    Raises:
        ConfigError: the kind is not known.
        BrokerUnreachableError: that broker, or with ``auto`` any, is not installed.
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
    """A broker as a child process, and a context manager that stops it.

    Attributes:
        kind: ``mosquitto`` or ``amqtt``.
        port: its TCP port on 127.0.0.1, the same after every restart.
        url: URL for clients.
        log_file: file with its output.
    """

    def __init__(self, kind: BrokerKind, directory: Path, port: int, queue: QueueLimits = SMALL_FLEET) -> None:
        self.kind = kind
        self.port = port
        self.url = f"mqtt://127.0.0.1:{port}"
        self.log_file = directory / f"{kind}.log"
        self._directory = directory
        self._queue = queue
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
        """Its process id; 0 if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def start(self) -> None:
        """Start it and return once its port answers.

        Raises:
            BrokerUnreachableError: the port is in use, or the broker ended or did not answer within START_S; the message
                then includes the end of its log.
        """
        if self.pid:
            return
        if answers(self.port):
            raise BrokerUnreachableError(
                f"port {self.port} is in use by another program", hint="choose another port, or 0 for a free one"
            )
        self._process = self._spawn(self._command())
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and self._process.poll() is None:
            if answers(self.port):
                return
            time.sleep(0.01)
        ended = self._process.poll()
        self.kill()
        what = f"ended with status {ended}" if ended is not None else f"did not answer in {START_S:g} s"
        raise BrokerUnreachableError(
            f"{self.kind} {what} on port {self.port}: {self._log_tail()}", hint=f"see {self.log_file}"
        )

    def stop(self) -> None:
        """Stop it with SIGTERM, or kill it after STOP_S."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, without a clean stop, as in a power cut."""
        self._end(signal.SIGKILL)

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
        # Without site-packages the launcher starts faster, and it needs the standard library only.
        return (sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), binary, "-c", str(config))

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start ``command`` from a thread that runs as long as the broker, since PR_SET_PDEATHSIG is bound to that thread."""
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
                        # Ctrl-C reaches the terminal's whole process group, and the broker must outlive its clients.
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


def answers(port: int) -> bool:
    """Return whether a program listens at a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast("int", probe.getsockname()[1])


def start_broker(kind: str, directory: Path, port: int = 0, *, queue: QueueLimits = SMALL_FLEET) -> BrokerProcess:
    """Start a broker that only this machine can reach, and return once it answers.

    Args:
        kind: ``mosquitto``, ``amqtt``, or ``auto`` for the first of them that is installed.
        directory: for its configuration, log and persisted state; created if missing.
        port: TCP port on 127.0.0.1; 0 for any free one.
        queue: limits of mosquitto's queue for each client, see `queue_limits`.

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
