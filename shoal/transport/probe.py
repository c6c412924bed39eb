"""Try a broker without disturbing a running program: reach it, log in, and read the expiry of its certificate."""

from __future__ import annotations

import secrets
import socket
import ssl
from typing import TYPE_CHECKING

from shoal import limits
from shoal.errors import BrokerUnreachableError, ConfigError, text_of
from shoal.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.address import BrokerAddress


def log_in(address: BrokerAddress, client_id: str) -> str:
    """Connect to a broker with its credentials, and disconnect; return the MQTT version in use: ``5`` or ``3.1.1``.

    A random suffix is added to ``client_id``, since a second client of the same id would take over the session of the first.

    Raises:
        BrokerUnreachableError: no broker answers within CONNECT_TIMEOUT_S, or it refuses the credentials or certificate.
        ConfigError: a certificate or key file can't be read.
    """
    transport = MqttTransport(address, f"{client_id}-{secrets.token_hex(4)}", lambda _event: None, session_expiry_s=0)
    try:
        transport.start(require=True)
        return transport.protocol_version
    finally:
        transport.close()


def certificate_expiry(address: BrokerAddress) -> int:
    """Return the unix time in seconds at which the certificate of a broker with TLS expires.

    Raises:
        BrokerUnreachableError: no connection, or a certificate that is not trusted.
        ConfigError: a certificate or key file can't be read.
    """
    context = address.tls_context()
    assert context is not None, "the address has no TLS"
    try:
        with (
            socket.create_connection((address.host, address.port), limits.CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as connection,
        ):
            expiry = (connection.getpeercert() or {})["notAfter"]
    except (OSError, KeyError) as error:
        raise BrokerUnreachableError(
            f"no TLS connection to {address}: {text_of(error)}",
            hint="check --ca, the broker's certificate and its host name, and this machine's clock",
        ) from error
    return int(ssl.cert_time_to_seconds(str(expiry)))


def client_certificate_expiry(file: Path) -> int:
    """Return the unix time in seconds at which the certificate in a PEM file expires.

    Raises:
        ConfigError: the file can't be read, or holds no certificate.
    """
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return int(load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a readable certificate: {text_of(error)}", hint="give a PEM file") from error
