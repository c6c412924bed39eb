"""Access to the fleet page: the address to listen on, the token, and the host names that are answered."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError
from shoal.util.files import read_private

LEAST_TOKEN: Final = 16
"""Fewest characters of a token."""
MOST_TOKEN: Final = 512
MOST_PORT: Final = 65535
MAKE_ONE: Final = "(umask 077; head -c 24 /dev/urandom | base64 > page.token), then --http-token page.token"
_FORM: Final = "give HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464"


@dataclass(frozen=True, slots=True)
class Listen:
    """An address to listen on; port 0 lets the system choose."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine reach it."""
        return _is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Parse ``HOST:PORT``; an IPv6 address stands in brackets.

        Raises:
            ConfigError: it has another form.
        """
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        known = port.isascii() and port.isdecimal() and int(port) <= MOST_PORT
        if not colon or not host or not known or (":" in host) is not bracketed:
            raise ConfigError(f"--http {text!r} is no address to listen on", hint=_FORM)
        return cls(host, int(port))


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask the server.

    Attributes:
        listen: the address.
        token: the secret that each request must show; empty if none is needed.
    """

    listen: Listen
    token: bytes = field(default=b"", repr=False)

    @classmethod
    def load(cls, listen: Listen, token_file: Path | None) -> Access:
        """Read the token from a private file, which may be a systemd credential.

        Raises:
            ConfigError: the file can't be read, others can read it, the token is too short, or there is none and the address is
                not a loopback address.
        """
        if token_file is None:
            if not listen.is_loopback:
                raise ConfigError(f"--http {listen} is open to other machines and needs a token", hint=MAKE_ONE)
            return cls(listen)
        token = read_private(token_file, follow=True).strip()
        if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not token.isascii() or len(token.split()) != 1:
            raise ConfigError(
                f"the token in {token_file} is not one word of {LEAST_TOKEN} to {MOST_TOKEN} ASCII characters",
                hint=MAKE_ONE,
            )
        return cls(listen, token)

    def admits_host(self, host: str) -> bool:
        """Return whether a request with this ``Host`` may be answered.

        A page of another site could have its own name resolve to a loopback address, and read the answers in a browser of this
        machine; its requests carry that name. A token stops this as well, since no browser shows it to another site.
        """
        if not self.listen.is_loopback:
            return True
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        return _is_loopback(name.removeprefix("[").removesuffix("]"))

    def admits(self, authorization: str) -> bool:
        """Return whether a request with this ``Authorization`` may be answered.

        It is ``Bearer TOKEN``, or ``Basic`` with the token as the password, for which browsers ask people.
        """
        if not self.token:
            return True
        kind, _, value = authorization.partition(" ")
        shown = value.strip().encode("utf-8", "replace")
        if kind.lower() == "basic":
            shown = _password(shown)
        elif kind.lower() != "bearer":
            return False
        return hmac.compare_digest(shown, self.token)


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
