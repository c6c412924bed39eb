"""A `ModelReader` on an MQTT connection that lasts for one command of `shoal-fleet`."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Final

from shoal.owner.broker.address import beside_client_id, owner_address
from shoal.owner.keys.run_list import signed_plans
from shoal.owner.models.reader import ModelReader
from shoal.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.owner.keys.directory import FleetDirectory
    from shoal.transport.base import TransportEvent

POLL_S: Final = 0.1
TELL_S: Final = 2.0
"""Time between two lines of progress."""


def read_models(fleet: FleetDirectory, wait_s: float, tell: Callable[[str], None], run: int | None = 0) -> ModelReader:
    """Connect, read what the broker retains, and return the reader.

    The client id is random, so that the connection takes over none of another `shoal-fleet`.

    Args:
        fleet: the owner's directory.
        wait_s: seconds without any message after which the rest is taken not to come.
        tell: called with lines of progress and with warnings.
        run: see `ModelReader`.

    Raises:
        BrokerUnreachableError: no broker answers, or it refuses the owner's user.
    """
    inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    transport = MqttTransport(owner_address(fleet), beside_client_id(fleet.name), inbox.put, session_expiry_s=0)
    reader = ModelReader(fleet, signed_plans(fleet, tell), transport, run)
    reader.start()
    try:
        transport.start(require=True)
        last_s = told_s = time.monotonic()
        while not reader.complete and (now_s := time.monotonic()) - last_s < wait_s:
            try:
                event = inbox.get(timeout=POLL_S)
            except queue.Empty:
                pass
            else:
                last_s = now_s
                reader.on_event(event, now_s)
            if now_s - told_s >= TELL_S:
                told_s = now_s
                tell(_progress(reader, transport.bytes_received))
    finally:
        transport.close()
    return reader


def _progress(reader: ModelReader, received: int) -> str:
    arrived, announced = reader.progress
    if not announced:
        return "waiting for the announcement of the last round"
    return f"{arrived} of {announced} models, {received / 1e6:.1f} MB received"
