"""Broker addresses: host, port, TLS and credentials, parsed from a URL.

Example: ``BrokerAddress.parse("mqtts://dev-01:secret@broker.example")`` has port 8883, and ``str`` of it shows no password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from shoal.errors import ConfigError
from shoal.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES

if TYPE_CHECKING:
    import ssl

PORTS: Final = {"mqtt": 1883, "mqtts": 8883}
_FORM: Final = "use mqtt://host:port or mqtts://user:password@host:port"


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise a ConfigError unless a setting asks for chunks that a receiver takes and that are not tiny."""
    if not LEAST_CHUNK_BYTES <= chunk_bytes <= CHUNK_BYTES:
        raise ConfigError(
            f"chunk_bytes is from {LEAST_CHUNK_BYTES} to {CHUNK_BYTES}, not {chunk_bytes}",
            hint="take 1,024 bytes less than the largest packet of the broker",
        )


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

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> BrokerAddress:
        """Parse ``mqtt[s]://[user:password@]host[:port]``; user and password may be percent-encoded.

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
            raise ConfigError("the broker's URL begins neither with mqtt:// nor with mqtts://", hint=_FORM)
        host = parts.hostname or ""
        # Lengths as in DNS: the resolver raises UnicodeError, not OSError, for longer labels.
        if not host or len(host) > 253 or not host.isascii() or any(len(label) > 63 for label in host.split(".")):
            raise ConfigError("the broker's URL names no host", hint=_FORM)
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ConfigError("the broker's URL has something behind the port", hint=_FORM)
        tls = parts.scheme == "mqtts"
        if not tls and (ca_file or cert_file or key_file):
            raise ConfigError("certificates are given for a connection without TLS", hint="begin the URL with mqtts://")
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
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"

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
            context = ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert_file is not None:
                context.load_cert_chain(str(self.cert_file), str(self.key_file))
        except OSError as error:  # ssl.SSLError too
            raise ConfigError(
                f"the TLS files can't be used: {error}",
                hint="check ca_file, cert_file and key_file: PEM, readable by us",
            ) from error
        return context
