"""The owner's way to the broker: its address with user, password and certificates, and a connection for a single command."""

from __future__ import annotations

import queue
import secrets
from typing import TYPE_CHECKING, Self

from shoal.address import BrokerAddress
from shoal.membership.grants import OWNER_NAME
from shoal.owner.keys.settings import ca_file, settings_of
from shoal.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.transport.base import TransportEvent


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


class OwnerLink:
    """A connection to the broker for one command; a context manager that closes it.

    Its client id is random: several commands may be at work, and none takes over the connection of another.

    Attributes:
        transport: not started yet, so that subscriptions may come first.
    """

    def __init__(self, fleet: FleetDirectory) -> None:
        self._inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        client = beside_client_id(fleet.name)
        self.transport = MqttTransport(owner_address(fleet), client, self._inbox.put, session_expiry_s=0)

    def next(self, wait_s: float) -> TransportEvent | None:
        """Return the next event; None if there is none within ``wait_s``."""
        try:
            return self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()
