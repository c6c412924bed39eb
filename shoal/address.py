"""Broker addresses: host, port, TLS, websocket, proxy and credentials, parsed from a URL.

Example: ``BrokerAddress.parse("mqtts://dev-01:secret@broker.example")`` has port 8883, and ``str`` of it shows no password.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urlsplit

from shoal.errors import ConfigError
from shoal.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES

if TYPE_CHECKING:
    import ssl

PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_FORM: Final = "use mqtt://host:port, mqtts://user:password@host:port, or wss://host:port/path for a websocket"
WEBSOCKET_PATH: Final = "/mqtt"
"""Path of a websocket if the URL has none."""

PROXY_PORTS: Final = {"http": 8080, "socks5": 1080}
_PROXY_FORM: Final = "use http://host:port or socks5://host:port"
ALPN: Final = ("mqtt", "x-amzn-mqtt-ca")
"""Protocols that are offered to a broker whose MQTT shares port 443 with HTTPS."""

HTTPS_PORT: Final = 443


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise a ConfigError unless a setting asks for chunks that a receiver takes and that are not tiny."""
    if not LEAST_CHUNK_BYTES <= chunk_bytes <= CHUNK_BYTES:
        raise ConfigError(
            f"chunk_bytes is from {LEAST_CHUNK_BYTES} to {CHUNK_BYTES}, not {chunk_bytes}",
            hint="take 1,024 bytes less than the largest packet of the broker",
        )


class BrokerSettings(Protocol):
    """The settings of a program that say how it reaches the broker."""

    @property
    def broker(self) -> str:
        """The broker's URL; empty for that of the grant."""

    @property
    def ca(self) -> Path | None:
        """PEM file of trusted CA certificates."""

    @property
    def cert(self) -> Path | None:
        """PEM file of the client certificate."""

    @property
    def key(self) -> Path | None:
        """PEM file of its private key."""

    @property
    def chunk_bytes(self) -> int:
        """Largest payload of a chunk."""

    @property
    def proxy(self) -> str:
        """URL of the proxy; empty for that of the environment."""


class Granted(Protocol):
    """What the owner says of the broker, in a grant."""

    @property
    def broker(self) -> str:
        """The broker's URL."""

    @property
    def broker_ca(self) -> bytes:
        """Certificate, DER, of the CA that is trusted for it; empty for those of the system."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A broker's address and this client's credentials. ``repr`` and ``str`` show no user, password or private key.

    Attributes:
        host: name or IP address.
        port: TCP port.
        tls: whether the connection is encrypted.
        username: empty if the broker requires none.
        password: empty if the broker requires none.
        ca_file: PEM file of trusted CA certificates; None for the system's.
        cert_file: the client certificate, if the broker requires one.
        key_file: the private key of ``cert_file``.
        chunk_bytes: largest payload of a chunk for this broker.
        path: of the websocket; empty without one.
        proxy: URL of the proxy through which the broker is reached; empty without one.
        ca: certificate, DER, of the CA that is trusted if there is no ``ca_file``; empty for those of the system.
    """

    host: str
    port: int
    tls: bool = False
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = field(default=None, repr=False)
    chunk_bytes: int = CHUNK_BYTES
    path: str = ""
    proxy: str = field(default="", repr=False)
    ca: bytes = field(default=b"", repr=False)

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        proxy: str = "",
        ca: bytes = b"",
    ) -> BrokerAddress:
        """Parse ``mqtt[s]://[user:password@]host[:port]`` or ``ws[s]://.../path``; user and password may be percent-encoded.

        ``proxy`` is the URL of one; `routed` finds that of the environment.

        Raises:
            ConfigError: the URL has another form, certificates are given without TLS, or a client certificate is given
                without its key or the key without it. The message does not repeat the URL, which may hold a password.
        """
        # urlsplit checks the port only when it is read.
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError("the broker's URL is not valid", hint=_FORM) from error
        if parts.scheme not in PORTS:
            raise ConfigError(
                "the broker's URL begins neither with mqtt:// or mqtts:// nor with ws:// or wss://", hint=_FORM
            )
        host = parts.hostname or ""
        # Lengths as in DNS: the resolver raises UnicodeError, not OSError, for longer labels.
        if not host or len(host) > 253 or not host.isascii() or any(len(label) > 63 for label in host.split(".")):
            raise ConfigError("the broker's URL names no host", hint=_FORM)
        websocket = parts.scheme.startswith("ws")
        if (not websocket and parts.path not in ("", "/")) or parts.query or parts.fragment:
            raise ConfigError("the broker's URL has something behind the port", hint=_FORM)
        if not parts.path.isprintable() or not parts.path.isascii() or " " in parts.path:
            raise ConfigError("the path of the broker's URL has other characters than a URL may have", hint=_FORM)
        tls = parts.scheme in ("mqtts", "wss")
        if not tls and (ca_file or cert_file or key_file):
            raise ConfigError(
                "certificates are given for a connection without TLS", hint="begin the URL with mqtts:// or wss://"
            )
        if (cert_file is None) != (key_file is None):
            raise ConfigError("a client certificate needs its key, and the key its certificate")
        return cls(
            host=host,
            port=PORTS[parts.scheme] if port is None else port,
            tls=tls,
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            chunk_bytes=chunk_bytes,
            path=(parts.path.rstrip("/") or WEBSOCKET_PATH) if websocket else "",
            proxy=_checked_proxy(proxy) if proxy else "",
            ca=ca,
        )

    @classmethod
    def of(cls, settings: BrokerSettings, granted: Granted) -> BrokerAddress:
        """Return the address by a program's settings, or else by its grant.

        Raises:
            ConfigError: as `parse`.
        """
        return cls.parse(
            settings.broker or granted.broker,
            ca_file=settings.ca,
            cert_file=settings.cert,
            key_file=settings.key,
            chunk_bytes=settings.chunk_bytes,
            proxy=settings.proxy,
            ca=granted.broker_ca,
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'ws' if self.path else 'mqtt'}{'s' if self.tls else ''}://{host}:{self.port}{self.path}"

    @property
    def place(self) -> str:
        """The address in words, with the proxy through which it is reached."""
        return f"{self} through {self.proxy_name}" if self.proxy else str(self)

    @property
    def proxy_name(self) -> str:
        """The proxy without its user and password; empty without one."""
        return shown(self.proxy) if self.proxy else ""

    def routed(self) -> BrokerAddress:
        """Return the address as a connection takes it: through the proxy of the environment, if it has none of its own.

        That is ``https_proxy``, for encrypted connections to a host that is not private and that ``no_proxy`` does not have.

        Raises:
            ConfigError: its URL is not valid.
        """
        found = _environments_proxy(self.host) if self.tls and not self.proxy else ""
        return replace(self, proxy=found) if found else self

    @property
    def is_loopback(self) -> bool:
        """Whether the broker is on this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def tls_context(self) -> ssl.SSLContext | None:
        """Return a context that verifies the broker and requires TLS 1.2 or newer; None without TLS.

        Raises:
            ConfigError: a certificate or key file can't be read.
        """
        if not self.tls:
            return None
        import ssl  # not at the top: it takes 3 MB of memory

        try:
            own = None if self.ca_file else self.ca or None
            context = ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None, cadata=own)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert_file is not None:
                context.load_cert_chain(str(self.cert_file), str(self.key_file))
            if self.port == HTTPS_PORT and not self.path:
                context.set_alpn_protocols(list(ALPN))
        except OSError as error:  # ssl.SSLError too
            raise ConfigError(
                f"the TLS files can't be used: {error}",
                hint="check ca_file, cert_file and key_file: PEM, readable by us",
            ) from error
        return context


def shown(url: str) -> str:
    """Return the URL of a broker or of a proxy without its user and password.

    Raises:
        ConfigError: it is neither.
    """
    parts = urlsplit(url)
    if parts.scheme not in PROXY_PORTS:
        return str(BrokerAddress.parse(url))
    return f"{parts.scheme}://{parts.hostname}:{parts.port or PROXY_PORTS[parts.scheme]}"


def in_words(url: str) -> str:
    """Return a broker's URL without its user and password, for people, also if it is not valid."""
    try:
        return str(BrokerAddress.parse(url))
    except ConfigError:
        return "an address that is not valid"


def _checked_proxy(url: str) -> str:
    """Return the URL of a proxy.

    Raises:
        ConfigError: it has another form. The message does not repeat it, since it may hold a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 1
    except ValueError as error:
        raise ConfigError("the proxy's URL is not valid", hint=_PROXY_FORM) from error
    if parts.scheme not in PROXY_PORTS or not parts.hostname or not 0 < port < 1 << 16 or parts.path not in ("", "/"):
        raise ConfigError("the proxy's URL is not valid", hint=_PROXY_FORM)
    return url


def _environments_proxy(host: str) -> str:
    """Return the proxy that the environment names for encrypted connections to ``host``; empty without one.

    Raises:
        ConfigError: its URL is not valid.
    """
    found = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY") or ""
    excepted = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    names = [name.strip().lower().lstrip("*").lstrip(".") for name in excepted]
    direct = "*" in (name.strip() for name in excepted) or any(
        name and (host.lower() == name or host.lower().endswith(f".{name}")) for name in names
    )
    return "" if not found or direct or _is_private(host) else _checked_proxy(found)


def _is_private(host: str) -> bool:
    if host == "localhost" or host.endswith(".local"):
        return True
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False
