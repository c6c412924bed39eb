"""The owner's way to the broker: its address with user, password and certificates, and client ids for single commands."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from shoal.address import BrokerAddress
from shoal.membership.grants import OWNER_NAME
from shoal.owner.keys.settings import ca_file, settings_of

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory


def owner_address(fleet: FleetDirectory) -> BrokerAddress:
    """Return the broker's address as the owner connects to it: by default with the CA that `broker-config` made, if any."""
    url, config = fleet.broker_for(OWNER_NAME), settings_of(fleet.path)
    return BrokerAddress.parse(
        url,
        ca_file=ca_file(fleet.path, url),
        cert_file=config.cert,
        key_file=config.key,
        chunk_bytes=config.chunk_bytes,
        proxy=config.proxy,
    )


def beside_client_id(fleet: str) -> str:
    """Return a client id that no other program has: a connection with it takes over none of another `shoal-fleet`."""
    return f"shoal-{fleet}-owner-{secrets.token_hex(4)}"
