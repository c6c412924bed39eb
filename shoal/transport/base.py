"""The interface between the protocol and the network: `Transport`, and the events that it reports.

Implementations are shoal/transport/mqtt.py (a real broker) and the lab's loopback (in memory, virtual time). Both guarantee
at-least-once delivery to the broker only, and less at QoS 0. An acknowledged publish may never reach its recipient, so the
protocol has acknowledgements of its own and removes duplicates.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.chunking import Chunk, ChunkKind, split

PACKET_OVERHEAD_BYTES: Final = 16
"""Most bytes of a PUBLISH besides topic and payload: fixed header (5), topic length (2), packet id (2), properties."""

Qos = Literal[0, 1]
"""MQTT's quality of service: 1 is resent until the broker acknowledges it; 0 is sent once, and lost with the connection.

A broker does not queue a message at 0 for an offline subscriber, and may deliver it before messages at 1 that it holds back
for a busy one.
"""

Will = tuple[str, bytes]
"""Topic and payload that the broker publishes, retained, if the connection ends without DISCONNECT."""


def _already_acknowledged() -> None:
    """Do nothing; the transport acknowledged the message on arrival."""


@dataclass(frozen=True, slots=True)
class Message:
    """A received publish.

    Attributes:
        topic: topic of the publish.
        payload: its bytes.
        retained: the broker had stored it before we subscribed.
        acknowledge: acknowledges the message to the broker once it is handled. Call it once, in the order of arrival; it
            does nothing if the transport acknowledges on arrival.
    """

    topic: str
    payload: bytes = field(repr=False)
    retained: bool = False
    acknowledge: Callable[[], None] = field(default=_already_acknowledged, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker accepted the connection.

    Attributes:
        session_present: whether it still has our session.
        expires_at_s: unix seconds at which its certificate expires; None without TLS.
    """

    session_present: bool
    expires_at_s: int | None = None


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection ended; the transport reconnects on its own."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unreached:
    """An attempt to connect has failed, for another reason than the one before; the transport tries again on its own."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another client connected with our client id. The transport stopped; a reconnection would only disconnect that client."""


TransportEvent = Message | Connected | Disconnected | Unreached | TakenOver
Sink = Callable[[TransportEvent], None]
"""Receives every event, possibly on the network thread: put the event on a queue and return."""


class Transport(Protocol):
    """A client of a broker that survives disconnections."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes handed to the network, resends not counted."""

    @property
    def bytes_received(self) -> int:
        """Payload bytes of every message that reached the sink."""

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of a chunk (`shoal.protocol.chunking.split`) within the broker's packet limit, if it announced one."""

    def start(self, *, require: bool = False) -> None:
        """Begin to connect and return at once; with ``require``, return once the first connection is accepted.

        Raises:
            BrokerUnreachableError: only with ``require``: the first connection failed or was not accepted within
                CONNECT_TIMEOUT_S.
        """

    def publish(self, topic: str, payload: bytes | Chunk, *, retain: bool = False, qos: Qos = 1) -> None:
        """Queue a message for the broker, also while offline; never blocks. A chunk is copied as it is sent.

        Raises:
            WireError: the packet is above MAX_PACKET_BYTES, the topic is not publishable, the queue is full, or the
                transport is closed.
        """

    def together(self) -> AbstractContextManager[None]:
        """Send what the block publishes once it ends, with less work than one by one."""

    def subscribe(self, topic_filter: str) -> None:
        """Subscribe to ``topic_filter``, now and after every reconnection.

        A repeated call has the broker send its retained messages again (MQTT 3.1.1, 3.8.4-3; MQTT 5 with retain handling 0).
        Don't unsubscribe before it: a broker that handles both at once, such as aedes, may finish them in the other order.
        """

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe from ``topic_filter``."""

    def pending(self) -> int:
        """Return the number of unacknowledged publishes; one at QoS 0 counts until the broker's machine has received it."""

    def close(self) -> None:
        """Send the queue for a bounded time, disconnect without the will being published, and release all resources."""


def packet_bytes(topic: str, payload: bytes | Chunk) -> int:
    """Return an upper bound of the PUBLISH packet's size."""
    return len(topic.encode()) + len(payload) + PACKET_OVERHEAD_BYTES


def check_publish(topic: str, payload: bytes | Chunk, max_packet_bytes: int = limits.MAX_PACKET_BYTES) -> None:
    """Check a publish before it is queued, since one that the broker refuses would be resent and refused for ever.

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


def publish_in_chunks(
    transport: Transport, topic: str, payload: bytes, kind: ChunkKind, name: bytes, round_: int = 0
) -> None:
    """Publish a message that is not retained, under its transfer id ``name``, in chunks within the broker's packet limit."""
    for chunk in split(payload, kind=kind, round=round_, chunk_bytes=transport.chunk_bytes, name=name):
        transport.publish(topic, chunk)
