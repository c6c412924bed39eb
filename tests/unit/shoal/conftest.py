"""Scripted brokers, and transports to connect to them."""

import queue
from collections.abc import Callable, Iterator

import pytest

from shoal.transport.base import Connected, TransportEvent
from shoal.transport.mqtt import MqttTransport
from tests.helpers.scripted_broker import Script, ScriptedBroker


@pytest.fixture
def broker() -> Iterator[Callable[[Script], ScriptedBroker]]:
    made: list[ScriptedBroker] = []

    def make(script: Script) -> ScriptedBroker:
        made.append(ScriptedBroker(script))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[MqttTransport, "queue.Queue[TransportEvent]"]]]:
    made: list[MqttTransport] = []

    def make(url: str, **options: object) -> tuple[MqttTransport, "queue.Queue[TransportEvent]"]:
        events: queue.Queue[TransportEvent] = queue.Queue()
        transport = MqttTransport(
            url,
            "client-1",
            events.put,
            reconnect_min_s=0.01,
            reconnect_max_s=0.05,
            **options,  # type: ignore[arg-type]
        )
        made.append(transport)
        return transport, events

    yield make
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.transport.mqtt.FLUSH_S", 0.1)  # what a test has left unsent need not leave
        for transport in made:
            transport.close()


@pytest.fixture
def online(
    broker: Callable[[Script], ScriptedBroker],
    connect: Callable[..., tuple[MqttTransport, "queue.Queue[TransportEvent]"]],
) -> Callable[..., tuple[MqttTransport, "queue.Queue[TransportEvent]"]]:
    """Start a transport to a scripted broker, and return it once it is connected."""

    def start(script: Script, **options: object) -> tuple[MqttTransport, "queue.Queue[TransportEvent]"]:
        transport, events = connect(broker(script).url, **options)
        transport.start()
        assert events.get(timeout=20) == Connected(session_present=False)
        return transport, events

    return start
