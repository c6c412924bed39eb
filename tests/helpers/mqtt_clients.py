"""Clients of real brokers: transports with their events in a queue, and functions that wait for an event."""

import queue
import time

import pytest

from shoal.address import BrokerAddress
from shoal.transport.base import Message, TransportEvent
from shoal.transport.local_broker import find_mosquitto
from shoal.transport.mqtt import MqttTransport
from tests.helpers.waiting import until

BROKERS = [
    pytest.param("mosquitto", marks=pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")),
    pytest.param("amqtt", marks=pytest.mark.long if find_mosquitto() else ()),
]
"""amqtt is tried by `.ci/brokers`, and by the default tests where there is no mosquitto."""
WAIT_S = 10.0


class Client:
    """A transport with its events in a queue."""

    def __init__(self, url: str | BrokerAddress, name: str, **options: object) -> None:
        self.events: queue.Queue[TransportEvent] = queue.Queue()
        self.transport = MqttTransport(
            url,
            name,
            self.events.put,
            reconnect_min_s=0.05,
            reconnect_max_s=0.3,
            **options,  # type: ignore[arg-type]
        )

    def until(self, kind: type[TransportEvent], wait_s: float = WAIT_S) -> TransportEvent:
        """Return the next event of ``kind``, passing over others."""
        end = time.monotonic() + wait_s
        while True:
            event = self.events.get(timeout=max(0.0, end - time.monotonic()))
            if isinstance(event, kind):
                return event

    def message(self) -> Message:
        event = self.until(Message)
        assert isinstance(event, Message)
        return event


def settle(one: Client, topic: str) -> None:
    """Return when the broker has taken ``one``'s subscriptions: it must match ``topic``."""
    for _ in range(50):
        one.transport.publish(topic, b"settled?")
        try:
            while one.until(Message, 0.1) != Message(topic, b"settled?"):
                pass
        except queue.Empty:
            continue
        until(lambda: one.transport.pending() == 0)
        while not one.events.empty():
            one.events.get()
        return
    pytest.fail("the subscription does not work")
