"""The owner's way to the broker: its address with user, password and certificates, and client ids for single commands."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal.address import BrokerAddress
from shoal.limits import CHUNK_BYTES
from shoal.membership.grants import OWNER_NAME

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory

CA_FILE: Final = "broker-ca.crt"
"""Certificate of the CA that `shoal-fleet broker-config` makes, in the owner's directory."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for mqtts, and the largest chunk to send.

    The default CA is the one that `shoal-fleet broker-config` made, if there is one.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    chunk_bytes: int = CHUNK_BYTES


def owner_address(fleet: FleetDirectory, tls: Tls) -> BrokerAddress:
    """Return the broker's address as the owner connects to it."""
    url = fleet.broker_for(OWNER_NAME)
    own_ca = fleet.path / CA_FILE
    ca = tls.ca or (own_ca if own_ca.exists() and url.startswith("mqtts") else None)
    return BrokerAddress.parse(url, ca_file=ca, cert_file=tls.cert, key_file=tls.key, chunk_bytes=tls.chunk_bytes)


def beside_client_id(fleet: str) -> str:
    """Return a client id that no other program has: a connection with it takes over none of another `shoal-fleet`."""
    return f"shoal-{fleet}-owner-{secrets.token_hex(4)}"
