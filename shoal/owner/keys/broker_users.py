"""The broker's users and their passwords, all derived from one stored secret."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.errors import IntegrityError
from shoal.membership.grants import OWNER_NAME
from shoal.util.files import read_if_there, read_private, sync_directory, write_private

USERS_FILE: Final = "broker.key"
DYNAMIC_FILE: Final = "broker.dynamic"
"""An empty file that marks a broker with the dynamic security plugin."""
HOME_ASSISTANT_FILE: Final = "broker.home-assistant"
"""Has Home Assistant's discovery prefix, if the broker's files let the aggregator publish its sensors."""
REPLACED_FILE: Final = "parties.replaced"
"""Has a line with name and fingerprint of each aggregator and device that was replaced."""
USERS_HINT: Final = (
    "take it from a backup, or remove it: broker-config then makes new passwords, which every party needs"
)
SECRET_BYTES: Final = 32
PASSWORD_BYTES: Final = 18
ENROL_USER: Final = "enrol"
"""User for enrolment requests; its password is in the lines that `shoal-fleet invite` prints."""

HOME_ASSISTANT_USER: Final = "home-assistant"
"""User with which Home Assistant reads the fleet's sensors."""

DEVICE_RESERVED: Final = (OWNER_NAME, ENROL_USER, HOME_ASSISTANT_USER, "aggregator")
ITERATIONS: Final = 101
"""mosquitto's own default; more iterations would add nothing to passwords of 144 random bits."""

_SALT_BYTES: Final = 12


class BrokerUsers:
    """Passwords of a fleet's broker; false, and without passwords, until `make`."""

    def __init__(self, directory: Path) -> None:
        """Read the users' secret from the owner's ``directory``, if there is one.

        Raises:
            ConfigError: the file can't be read.
            IntegrityError: the file is damaged.
        """
        self._file, self._dynamic = directory / USERS_FILE, directory / DYNAMIC_FILE
        self._gone = directory / REPLACED_FILE
        self._replaced = (read_if_there(self._gone) or b"").decode(errors="replace").splitlines()
        self._prefix = directory / HOME_ASSISTANT_FILE
        self._secret = self._read()

    def __bool__(self) -> bool:
        return bool(self._secret)

    def __repr__(self) -> str:
        return f"BrokerUsers({self._file}, <secret>)"

    def make(self) -> None:
        """Draw the secret, unless there is one; from then on addresses in grants and tokens contain user and password.

        Call it in `FleetDirectory.changing`.
        """
        if not self._read():
            write_private(self._file, os.urandom(SECRET_BYTES))
        self._secret = self._read()

    def _read(self) -> bytes:
        if not self._file.exists():
            return b""
        secret = read_private(self._file)
        if len(secret) != SECRET_BYTES:
            raise IntegrityError(
                f"{self._file} is damaged: it has {len(secret)} bytes, not {SECRET_BYTES}", hint=USERS_HINT
            )
        return secret

    def password(self, user: str) -> str:
        """Return the password of ``user``: 24 characters of base64url, HKDF-SHA256 of the secret and the name.

        A party that has the name of a replaced one has another password than that one.
        """
        info = b"shoal/v1/broker-user/" + user.encode()
        if before := self.times_replaced(user):
            info += b"/%d" % before
        raw = HKDF(hashes.SHA256(), PASSWORD_BYTES, None, info).derive(self._secret)
        return base64.urlsafe_b64encode(raw).decode()

    def address(self, url: str, user: str) -> str:
        """Return ``url`` with user and password; unchanged if there are no users."""
        if not self._secret:
            return url
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{user}:{self.password(user)}@{host}"

    @property
    def last_replaced(self) -> str:
        """Name of the party that was replaced last; empty without one."""
        return self._replaced[-1].partition(" ")[0] if self._replaced else ""

    def times_replaced(self, name: str) -> int:
        """Return how many parties of this name were replaced."""
        return sum(line.startswith(f"{name} ") for line in self._replaced)

    def is_replaced(self, print_: str) -> bool:
        """Return whether the party with this fingerprint was replaced."""
        return any(line.endswith(f" {print_}") for line in self._replaced)

    def replace(self, name: str, print_: str) -> None:
        """Record that a party is replaced, whose keys are never taken again; durable on return. Call it in `changing`."""
        if not self.is_replaced(print_):
            self._replaced.append(f"{name} {print_}")
            write_private(self._gone, "".join(f"{line}\n" for line in self._replaced).encode())

    def digest(self, user: str) -> tuple[bytes, bytes]:
        """Return a fresh salt, and with it PBKDF2-HMAC-SHA512 of the password of ``user`` in ITERATIONS, as mosquitto does."""
        salt = os.urandom(_SALT_BYTES)
        return salt, hashlib.pbkdf2_hmac("sha512", self.password(user).encode(), salt, ITERATIONS)

    def hashed(self, user: str) -> str:
        """Return the line of mosquitto's password file: ``user:$7$iterations$salt$PBKDF2-HMAC-SHA512``."""
        salt, digest = self.digest(user)
        return f"{user}:$7${ITERATIONS}${_base64(salt)}${_base64(digest)}"

    @property
    def dynamic(self) -> bool:
        """Whether the broker takes users while it runs, by mosquitto's dynamic security plugin."""
        return self._dynamic.exists()

    def set_dynamic(self, wanted: bool) -> None:
        """Record how the broker takes users; durable on return. Call it in `FleetDirectory.changing`."""
        _set(self._dynamic, b"" if wanted else None)

    @property
    def home_assistant(self) -> str:
        """Home Assistant's discovery prefix; empty if the broker's files have no access for its sensors."""
        data = read_if_there(self._prefix)
        return "" if data is None else data.decode("ascii", errors="replace")

    def set_home_assistant(self, prefix: str) -> None:
        """Record the prefix, or remove it if it is empty; durable on return. Call it in `FleetDirectory.changing`."""
        _set(self._prefix, prefix.encode() or None)


def _set(file: Path, data: bytes | None) -> None:
    """Write a file, or remove it for None; durable on return."""
    if data is not None:
        write_private(file, data)
    else:
        file.unlink(missing_ok=True)
        sync_directory(file.parent)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
