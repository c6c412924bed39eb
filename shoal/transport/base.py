"""The one seam between the protocol and the network: what a transport does, and the events it reports.

Implementations are shoal/transport/mqtt.py (a real broker) and shoal/transport/loopback.py (in memory, virtual time). Both
promise at-least-once delivery to the broker, or less at QoS 0, and nothing more: an acknowledged publish is not a delivered
one, so the protocol above acknowledges on its own and removes duplicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from shoal import limits
from shoal.errors import WireError

PACKET_OVERHEAD_BYTES: Final = 16
"""At most this many bytes of a PUBLISH are neither topic nor payload: 5 fixed header, 2 lengths, 2 packet id, properties."""

Qos = Literal[0, 1]
"""MQTT's quality of service: 1 is sent until the broker has acknowledged it; 0 is sent once, and lost with the connection.

A message at 0 also passes by a subscriber that is away, and overtakes those at 1 that a broker holds back for a busy one.
"""

Will = tuple[str, bytes]
"""Topic and payload that the broker publishes, retained, when the connection dies without a goodbye."""


def _already_acknowledged() -> None:
    """Do nothing: the transport acknowledged the message on arrival."""


@dataclass(frozen=True, slots=True)
class Message:
    """A publish arrived.

    Attributes:
        topic: where it was published.
        payload: its bytes.
        retained: the broker stored it before we subscribed.
        acknowledge: tells the broker that the message was handled. Call it once, in the order of arrival; it does
            nothing where the transport acknowledges on arrival.
    """

    topic: str
    payload: bytes = field(repr=False)
    retained: bool = False
    acknowledge: Callable[[], None] = field(default=_already_acknowledged, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker accepted us; ``session_present`` says that it still holds our session."""

    session_present: bool


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection ended; the transport reconnects on its own."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another client uses our client id: the transport stopped, since coming back would only throw the other one out."""


TransportEvent = Message | Connected | Disconnected | TakenOver
Sink = Callable[[TransportEvent], None]
"""Receives every event. It may run on the network thread: put the event on a queue and return."""


class Transport(Protocol):
    """Publishes and receives messages of a broker, through disconnections."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes handed to the network, resends not counted."""

    @property
    def bytes_received(self) -> int:
        """Payload bytes of every message that reached the sink."""

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of a chunk (`shoal.protocol.chunking.split`) that the broker takes, as far as it has told its limit."""

    def start(self, *, require: bool = False) -> None:
        """Begin to connect and return at once; with ``require``, return when the first connection stands.

        Raises:
            BrokerUnreachableError: only with ``require``: the first connection failed or took CONNECT_TIMEOUT_S.
        """

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, qos: Qos = 1) -> None:
        """Queue a message for the broker; never blocks, works offline.

        Raises:
            WireError: the packet is above MAX_PACKET_BYTES, the topic is not publishable, the queue is full, or the
                transport is closed.
        """

    def subscribe(self, topic_filter: str) -> None:
        """Receive what matches ``topic_filter``, now and after every reconnection."""

    def unsubscribe(self, topic_filter: str) -> None:
        """No longer receive ``topic_filter``."""

    def pending(self) -> int:
        """Return how many publishes the broker has not acknowledged; those at QoS 0 count until its machine has received them."""

    def close(self) -> None:
        """Flush what is queued for a bounded time, say goodbye (no will is published) and release everything."""


def resubscribe(transport: Transport, topic_filter: str) -> None:
    """Have the broker send once more what it retains for ``topic_filter``."""
    transport.unsubscribe(topic_filter)
    transport.subscribe(topic_filter)


def packet_bytes(topic: str, payload: bytes) -> int:
    """Return an upper bound of the PUBLISH packet's size."""
    return len(topic.encode()) + len(payload) + PACKET_OVERHEAD_BYTES


def check_publish(topic: str, payload: bytes, max_packet_bytes: int = limits.MAX_PACKET_BYTES) -> None:
    """Refuse what a broker would refuse: an oversized publish is poison, resent and refused for ever.

    Raises:
        WireError: the packet would be above ``max_packet_bytes``, or the topic is empty or holds a wildcard.
    """
    if not topic or "+" in topic or "#" in topic or "\0" in topic:
        raise WireError(f"{topic!r} is not a topic to publish on")
    size = packet_bytes(topic, payload)
    if size > max_packet_bytes:
        raise WireError(
            f"a publish of {size} bytes is above the limit of {max_packet_bytes}",
            hint="an oversized publish is poison: send the payload in chunks (shoal.protocol.chunking.split)",
        )
