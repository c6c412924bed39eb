"""An in-memory broker on virtual time, to run the whole protocol without sockets, threads or a clock.

Messages are delivered only in calls of ``pump`` and ``advance``; two runs with the same calls and the same faults deliver
the same messages in the same order. It follows MQTT's rules: retained messages, wills, persistent sessions, wildcard
filters, and one connection per client id.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from shoal import limits
from shoal.errors import UsageError, WireError
from shoal.protocol.chunking import Chunk
from shoal.protocol.topics import matches
from shoal.transport.base import (
    Connected,
    Disconnected,
    Message,
    Qos,
    Sink,
    TakenOver,
    TransportEvent,
    Will,
    check_publish,
)
from shoal.transport.exact_topics import ExactTopics, Request

MAX_STEPS: Final = 10_000_000
"""Most steps of one pump: more mean that two peers answer each other without end."""


@dataclass(slots=True)
class _Session:
    """The broker's session of one client id, which outlives its connections."""

    transport: LoopbackTransport
    online: bool = False
    filters: dict[str, None] = field(default_factory=dict)
    backlog: deque[Message] = field(default_factory=deque)


class LoopbackBroker:
    """The broker and the network around it; single-threaded.

    Args:
        faults: delays, losses and duplicates of messages; none by default. May be replaced at any time.
        queue_offline: queue messages for disconnected clients, as mosquitto does and amqtt for anonymous ones does not.
        wildcards: send retained messages to filters with wildcards, as MQTT asks and RabbitMQ 3.10 does not.

    Attributes:
        wildcards: as given; may be replaced at any time.
        now_s: virtual time in seconds.
        retained: the retained messages, payload by topic.
    """

    def __init__(self, faults: Faults | None = None, *, queue_offline: bool = True, wildcards: bool = True) -> None:
        self.faults = faults
        self.retained: dict[str, bytes] = {}
        self.now_s = 0.0
        self._queue_offline = queue_offline
        self.wildcards = wildcards
        self._sessions: dict[str, _Session] = {}
        self._lost_s: dict[str, float] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def pump(self) -> int:
        """Carry out all steps that are due now, and those that they cause at once; return their number.

        Raises:
            UsageError: the peers answer each other without end.
        """
        steps = 0
        while self._agenda and self._agenda[0][0] <= self.now_s:
            if steps >= MAX_STEPS:
                raise UsageError(
                    "the loopback broker does not come to rest", hint="two peers answer each other at once"
                )
            heapq.heappop(self._agenda)[2]()
            steps += 1
        return steps

    def advance(self, seconds: float) -> int:
        """Advance virtual time by ``seconds`` and carry out each step at its time; return the number of steps."""
        until = self.now_s + seconds
        steps = self.pump()
        while self._agenda and self._agenda[0][0] <= until:
            self.now_s = self._agenda[0][0]
            steps += self.pump()
        self.now_s = until
        return steps

    def next_due_s(self) -> float | None:
        """Return the virtual time of the next step; None if none is scheduled."""
        return self._agenda[0][0] if self._agenda else None

    def connected(self) -> tuple[str, ...]:
        """Return the ids of the connected clients, sorted."""
        return tuple(sorted(client for client, session in self._sessions.items() if session.online))

    def disconnect(self, client: str, *, graceful: bool = False) -> None:
        """End the connection of ``client`` until ``reconnect``; its will is published unless ``graceful``.

        Raises:
            UsageError: it is not connected.
        """
        if client not in self.connected():
            raise UsageError(f"client {client!r} is not connected")
        session = self._sessions[client]
        self._part(session, graceful=graceful)
        session.transport.report(Disconnected("closed" if graceful else "connection lost"))

    def reconnect(self, client: str) -> None:
        """Reconnect a disconnected client, at the next ``pump``.

        Raises:
            UsageError: it was never connected.
        """
        if client not in self._sessions:
            raise UsageError(f"client {client!r} was never connected")
        self._sessions[client].transport.start()

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` in ``delay_s`` seconds of virtual time."""
        self._sequence += 1
        # The sequence keeps actions of one time in order, and heapq from comparing functions.
        heapq.heappush(self._agenda, (self.now_s + delay_s, self._sequence, action))

    def accept(self, transport: LoopbackTransport) -> None:
        """Connect ``transport``; another transport connected with its client id is disconnected with `TakenOver`."""
        session = self._sessions.get(transport.client_id)
        present = session is not None
        fresh = session is None or session.transport is not transport
        if session is None:
            session = self._sessions[transport.client_id] = _Session(transport)
        elif session.online:
            if not fresh:
                return
            self._part(session, graceful=False)
            session.transport.report(TakenOver())
        session.transport = transport
        session.online = True
        transport.report(Connected(session_present=present))
        backlog, session.backlog = session.backlog, deque()
        for message in backlog:
            self._send(transport.client_id, message)
        asked, transport.asked_offline = transport.asked_offline, {}
        for topic_filter in asked.keys() - transport.filters.keys():
            self.unsubscribe(transport.client_id, topic_filter)
        for topic_filter in transport.filters:
            # The broker sends what it retains again for requests made offline, as for those made online.
            self.subscribe(transport.client_id, topic_filter, again=not fresh and topic_filter not in asked)
        transport.flush()

    def subscribe(self, client: str, topic_filter: str, *, again: bool = False) -> None:
        """Subscribe ``client`` and send the retained messages; with ``again`` only if its session lacks the filter."""
        session = self._sessions[client]
        known = topic_filter in session.filters
        session.filters[topic_filter] = None
        if (again and known) or not (self.wildcards or topic_filter in self.retained):
            return
        for topic, payload in self.retained.items():
            if matches(topic_filter, topic):
                self._send(client, Message(topic, payload, retained=True))

    def unsubscribe(self, client: str, topic_filter: str) -> None:
        """End a subscription of ``client``."""
        self._sessions[client].filters.pop(topic_filter, None)

    def submit(self, client: str, message: Message, settled: Callable[[], None], qos: Qos = 1) -> None:
        """Send a publish of ``client`` through the simulated network to the broker; ``retained`` asks the broker to retain it."""
        sent_s = self.now_s

        # A message at QoS 0 is lost if the connection broke after it was sent; one at QoS 1 would be resent.
        def arrive() -> None:
            if qos == 1 or not sent_s <= self._lost_s.get(client, -1.0) < self.now_s:
                self._arrive(message, qos)

        delays = self._fate(Hop.UP, client, message)
        for delay_s in delays:
            self.schedule(delay_s, arrive)
        self.schedule(max(delays, default=0.0), settled)

    def leave(self, transport: LoopbackTransport) -> None:
        """Disconnect ``transport`` without publishing its will."""
        session = self._sessions.get(transport.client_id)
        if session is not None and session.transport is transport:
            self._part(session, graceful=True)

    def _part(self, session: _Session, *, graceful: bool) -> None:
        session.online = False
        if not graceful:
            self._lost_s[session.transport.client_id] = self.now_s
        will = session.transport.will
        if will is not None and not graceful:
            last_words = Message(will[0], will[1], retained=True)
            self.schedule(0.0, lambda: self._arrive(last_words, 1))

    def _arrive(self, message: Message, qos: Qos) -> None:
        if message.retained:
            if message.payload:
                self.retained[message.topic] = message.payload
            else:
                self.retained.pop(message.topic, None)
        live = Message(message.topic, message.payload)
        for client, session in self._sessions.items():
            if any(matches(topic_filter, message.topic) for topic_filter in session.filters):
                self._send(client, live, qos)

    def _send(self, client: str, message: Message, qos: Qos = 1) -> None:
        for delay_s in self._fate(Hop.DOWN, client, message):
            self.schedule(delay_s, lambda: self._hand_over(client, message, qos))

    def _hand_over(self, client: str, message: Message, qos: Qos) -> None:
        session = self._sessions[client]
        if session.online:
            session.transport.report(message)
        elif self._queue_offline and qos == 1 and not message.retained:
            session.backlog.append(message)

    def _fate(self, hop: Hop, client: str, message: Message) -> tuple[float, ...]:
        if self.faults is None:
            return (0.0,)
        return tuple(self.faults(Passage(hop, client, message.topic, message.payload)))


class LoopbackTransport:
    """A client of a LoopbackBroker; implements shoal.transport.base.Transport.

    Args:
        broker: the broker to connect to.
        client_id: unique among the broker's clients.
        sink: receives every event, from inside the broker's ``pump``.
        will: topic and payload that the broker retains if the connection is lost.
    """

    chunk_bytes = limits.CHUNK_BYTES  # the broker in memory has no limit of its own

    def __init__(self, broker: LoopbackBroker, client_id: str, sink: Sink, will: Will | None = None) -> None:
        self.client_id = client_id
        self.will = will
        self.filters: dict[str, None] = {}
        self.asked_offline: dict[str, None] = {}
        self._exact = ExactTopics()
        self._broker = broker
        self._sink = sink
        self._queue: deque[tuple[Message, Qos]] = deque()
        self._unsettled = 0
        self._online = self._closed = False
        self.bytes_sent = self.bytes_received = 0

    def start(self, *, require: bool = False) -> None:  # noqa: ARG002 - a broker in memory always answers
        """Connect at the next ``pump``."""
        if self._closed:
            raise UsageError(f"transport {self.client_id!r} is closed")
        self._broker.schedule(0.0, lambda: None if self._closed else self._broker.accept(self))

    def together(self) -> AbstractContextManager[None]:
        """Do nothing more: what is published leaves with the next ``pump`` anyway."""
        return nullcontext()

    def publish(self, topic: str, payload: bytes | Chunk, *, retain: bool = False, qos: Qos = 1) -> None:
        """Queue a message; the first ``pump`` after the connection is accepted delivers it.

        Raises:
            WireError: the packet is too large, the topic is not publishable, or the transport is closed.
        """
        if self._closed:
            raise WireError("the transport is closed")
        check_publish(topic, payload)
        self._queue.append((Message(topic, bytes(payload), retained=retain), qos))
        if self._online:
            self.flush()

    def subscribe(self, topic_filter: str) -> None:
        """Subscribe to ``topic_filter``, now and after every reconnection; a repeated call requests what is retained again."""
        again = topic_filter in self.filters
        self.filters[topic_filter] = None
        exact = self._exact.requested(topic_filter, again=again)
        if self._online:
            self._broker.subscribe(self.client_id, topic_filter)
            self._request(exact)
        else:
            self.asked_offline[topic_filter] = None

    def _request(self, requests: Iterable[Request]) -> None:
        for topic, wanted in requests:
            if wanted:
                self._broker.subscribe(self.client_id, topic)
            else:
                self._broker.unsubscribe(self.client_id, topic)

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe from ``topic_filter``."""
        self.filters.pop(topic_filter, None)
        if self._online:
            self._broker.unsubscribe(self.client_id, topic_filter)
            self._request(self._exact.dropped(topic_filter))
        else:
            self.asked_offline[topic_filter] = None

    def pending(self) -> int:
        """Return the number of unacknowledged publishes; one at QoS 0 counts until the broker has received it."""
        return len(self._queue) + self._unsettled

    def close(self) -> None:
        """Disconnect; messages published while connected are still delivered."""
        self._closed = True
        if self._online:
            self._online = False
            self._broker.leave(self)

    def flush(self) -> None:
        """Pass all queued messages to the broker, which calls this when it accepts the connection."""
        while self._queue:
            message, qos = self._queue.popleft()
            self._unsettled += 1
            self.bytes_sent += len(message.payload)
            self._broker.submit(self.client_id, message, self._settled, qos)

    def report(self, event: TransportEvent) -> None:
        """Take an event from the broker and pass it to the sink."""
        if isinstance(event, Message):
            self.bytes_received += len(event.payload)
            if event.retained:
                self._request(self._exact.arrived(event.topic))
        else:
            self._online = isinstance(event, Connected)
            self._closed = self._closed or isinstance(event, TakenOver)
        self._sink(event)

    def _settled(self) -> None:
        self._unsettled -= 1


class Hop(Enum):
    """The direction of a message: UP to the broker, DOWN from it."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Passage:
    """A message about to travel one hop: from ``client`` to the broker (UP) or from the broker to ``client`` (DOWN)."""

    hop: Hop
    client: str
    topic: str
    payload: bytes = field(repr=False)


Faults = Callable[[Passage], Sequence[float]]
"""Returns one delay in seconds for each copy of a message that arrives: () loses it, (0.0,) delivers it at once."""
