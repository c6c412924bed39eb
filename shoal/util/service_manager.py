"""What a program tells systemd (``Type=notify``), and the secrets that systemd hands to it (``LoadCredential=``).

The manager starts a service with NOTIFY_SOCKET in its environment, and takes one datagram for each message: that the service is
ready, one line for `systemctl status`, that it is alive, that it stops. A unit with ``WatchdogSec=`` also sets WATCHDOG_USEC; a
service that then says nothing for that long is killed and started again. Without NOTIFY_SOCKET nothing is sent.

Rules
- Only the loop that does the work says that the program is alive, so that a loop that hangs is noticed.
- A message that can't be sent is dropped: a service manager that is away must not stop the work.
- A credential is a file in CREDENTIALS_DIRECTORY. Its folder protects it: systemd gives the file to the service's user by an
  access list, which its mode shows as readable by the group.

Example: ``manager = ServiceManager.from_environment(); manager.ready("serving reef"); manager.alive(time.monotonic())``
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError
from shoal.util.files import CREDENTIALS_VARIABLE, read_limited

LOG = logging.getLogger("shoal")
SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE: Final = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE: Final = "WATCHDOG_PID"
MOST_CREDENTIAL_BYTES: Final = 4096
ALIVE_PER_LIMIT: Final = 4
"""Signs of life within the watchdog's limit, so that one lost datagram does no harm."""
STATUS_EVERY_S: Final = 2.0
_NEVER: Final = -math.inf


class ServiceManager:
    """Sends messages to the service manager.

    Args:
        address: of its datagram socket, a path or, with a leading ``@``, an abstract name; empty without a manager.
        limit_s: time after which the manager kills a service that has said nothing; 0 without a watchdog.
    """

    def __init__(self, address: str = "", limit_s: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._pause_s = limit_s / ALIVE_PER_LIMIT
        self._alive_s = self._told_s = _NEVER
        self._status = ""
        self._failed = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ServiceManager:
        """Return the manager that started this process; one that takes no message if none did.

        Raises:
            ConfigError: the watchdog's limit is no number.
        """
        environment = os.environ if environment is None else environment
        limit_s = 0.0
        # The variable also reaches the children of a service, which the manager does not watch.
        if environment.get(WATCHDOG_PID_VARIABLE, str(os.getpid())) == str(os.getpid()):
            text = environment.get(WATCHDOG_VARIABLE, "0")
            if not text.isdecimal():
                raise ConfigError(f"{WATCHDOG_VARIABLE} is {text!r}, not a number of microseconds")
            limit_s = int(text) / 1e6
        return cls(environment.get(SOCKET_VARIABLE, ""), limit_s)

    def ready(self, status: str) -> None:
        """Say that the service has started, with a line for `systemctl status`."""
        self._status = status
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def alive(self, now_s: float) -> None:
        """Say that the loop works, as often as the watchdog's limit needs; ``now_s`` is monotonic seconds."""
        if self._pause_s and now_s - self._alive_s >= self._pause_s:
            self._alive_s = now_s
            self._send("WATCHDOG=1")

    def wants_status(self, now_s: float) -> bool:
        """Return whether a new line for `systemctl status` may be given now: at most every STATUS_EVERY_S."""
        return bool(self._address) and now_s - self._told_s >= STATUS_EVERY_S

    def status(self, text: str, now_s: float) -> None:
        """Give a line for `systemctl status`; the same line is not sent again."""
        self._told_s = now_s
        if text != self._status:
            self._status = text
            self._send(f"STATUS={_one_line(text)}")

    def stopping(self) -> None:
        """Say that the service ends."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.setblocking(False)
                end.sendto(text.encode(), self._address)
            self._failed = False
        except OSError as error:
            if not self._failed:
                LOG.warning("the service manager can't be reached", extra={"kv": {"reason": error.strerror or error}})
            self._failed = True


def credential(name: str, environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the path of the credential ``name`` that the service manager hands to this process; None without one."""
    folder = (os.environ if environment is None else environment).get(CREDENTIALS_VARIABLE, "")
    path = Path(folder, name)
    return path if folder and path.is_file() else None


def read_credential(path: Path) -> str:
    """Return the text of a credential, without the line's end.

    Raises:
        ConfigError: it can't be read, is longer than MOST_CREDENTIAL_BYTES, or is no text.
    """
    try:
        return read_limited(path, MOST_CREDENTIAL_BYTES).decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the credential {path} is no text") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())
