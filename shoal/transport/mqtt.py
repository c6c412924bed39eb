"""A transport over a real MQTT broker: paho-mqtt 2.x, MQTT 5 with a fall-back to 3.1.1, one network thread.

Only the network thread uses paho. ``publish`` and ``subscribe`` queue work and wake the thread, which hands paho at most a
window of publishes at a time: paho copies every packet it holds, resends all of them after a reconnection, and re-slices
a long backlog at every send.

States: connecting, online, waiting to reconnect (`backoff_s`), and ended, after ``close`` or once another program with our
client id was found. Connections that end soon are no sign of one: a bad link ends them too. The transport then looks for it
(`shoal.transport.rivals`), and goes on.

Example: a broker restarts. The thread reports `Disconnected`, waits a random time below one second, reconnects, reports
`Connected`, restores the subscriptions, and sends the publishes queued meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from paho.mqtt.client import MQTTMessage
from paho.mqtt.enums import MQTTProtocolVersion

from shoal import limits
from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError, UsageError, WireError
from shoal.protocol.chunking import MIN_CHUNK_BYTES, Chunk, chunk_bytes_within
from shoal.protocol.topics import matches
from shoal.transport.base import (
    Connected,
    Disconnected,
    Message,
    Qos,
    Sink,
    TakenOver,
    TransportEvent,
    Unreached,
    Will,
    check_publish,
)
from shoal.transport.exact_topics import ExactTopics
from shoal.transport.mqtt_connection import NO_RETAINED_MESSAGES, Link, LinkOptions, Publish
from shoal.transport.pacing import Pace, uniform
from shoal.transport.rivals import WATCH_S, RivalWatch, Witness

_log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 3.0
"""A CONNECT of MQTT 5 that is unanswered this long is repeated with 3.1.1."""

HANDSHAKE_LOOPBACK_S: Final = 0.5
"""The same for a broker on this machine: amqtt misreads the CONNECT of MQTT 5 and waits for more bytes without answering."""

FLUSH_S: Final = 2.0
"""Longest wait of ``close`` for queued publishes."""

SHORT_LIFE_S: Final = 10.0
"""A connection that ends sooner does not reset the back-off."""

MANY_ENDS: Final = 3
ENDS_S: Final = 3.0 * limits.RECONNECT_MAX_S
"""Once so many connections have ended within this time, another client may be using our id: it is looked for."""

SESSION_TAKEN_OVER: Final = 0x8E
UNSUPPORTED_VERSIONS: Final = (None, 0x84)
"""Reason codes after which another MQTT version may work: none at all, or `unsupported protocol version`."""

REFUSED_CREDENTIALS: Final = (0x86, 0x87, 0x8A)
"""Bad user name or password, not authorised, banned. paho converts the two codes of 3.1.1 to the first two."""
HINTS: Final = {
    **dict.fromkeys(
        REFUSED_CREDENTIALS,
        "the broker refuses this client's credentials: check user, password or certificate; a device may have been revoked",
    ),
    NO_RETAINED_MESSAGES: "Shoal needs retained messages: in mosquitto.conf, `retain_available true`; else another broker",
}
"""What to do about a broker that refuses a client, by reason code."""

_TICK_S: Final = 1.0
_CLOSING_TICK_S: Final = 0.05


class _Receipt(NamedTuple):
    """A received message to acknowledge: its connection's number, packet id, QoS, and bytes of memory."""

    connection: int
    packet_id: int
    qos: int
    bytes: int


def backoff_s(attempt: int, minimum_s: float, maximum_s: float, uniform: Callable[[float, float], float]) -> float:
    """Return the wait before reconnection ``attempt`` (0, 1, ...): exponential with full jitter.

    Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. Without jitter, a fleet that lost its broker
    would reconnect all at once.
    """
    # The exponent is bounded, since 2.0 ** 1024 overflows.
    return uniform(0.0, min(maximum_s, minimum_s * 2.0 ** min(attempt, 30)))


class MqttTransport:
    """A client of an MQTT broker; implements shoal.transport.base.Transport.

    Args:
        url: as `BrokerAddress.parse` takes it, or an address with its certificates and proxy.
        client_id: unique among the broker's clients; names the session.
        sink: receives every event on the network thread: put it on a queue and return.
        will: topic and payload that the broker retains if the connection is lost.
        session_expiry_s: time for which the broker stores the session of a lost connection. Over 3.1.1, 0 discards it and
            any other value leaves the time to the broker.
        max_queued_bytes: payload bytes not acknowledged by the broker above which ``publish`` raises.
        manual_ack: acknowledge a received message when its ``acknowledge`` is called, not on arrival, and stop reading
            while `limits.MAX_UNHANDLED_BYTES` of messages are unacknowledged. `inbox.Inbox` makes these calls.
        reconnect_min_s: bound of the random wait before the first reconnection; doubles with each attempt.
        reconnect_max_s: largest bound.
        pace: limits the rate of publishes; also while closing.
        witness: speaks for this program, to find another one that uses its identity; None without a presence.

    Attributes:
        bytes_sent: payload bytes handed to the network, resends not counted.
        bytes_received: payload bytes of every message that reached the sink.
    """

    def __init__(
        self,
        url: str | BrokerAddress,
        client_id: str,
        sink: Sink,
        *,
        will: Will | None = None,
        session_expiry_s: int = limits.SESSION_EXPIRY_DEVICE_S,
        max_queued_bytes: int = limits.MAX_TRANSFER_BYTES,
        manual_ack: bool = False,
        reconnect_min_s: float = limits.RECONNECT_MIN_S,
        reconnect_max_s: float = limits.RECONNECT_MAX_S,
        pace: Pace | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._pace = pace or Pace()
        if will is not None:
            check_publish(*will)
        self.address = (url if isinstance(url, BrokerAddress) else BrokerAddress.parse(url)).routed()
        self.client_id = client_id
        self._sink = sink
        self._max_queued_bytes = max_queued_bytes
        self._manual_ack = manual_ack
        self._reconnect_s = (reconnect_min_s, reconnect_max_s)
        self._options = LinkOptions(
            address=self.address,
            tls=self.address.tls_context(),
            client_id=client_id,
            will=will,
            session_expiry_s=session_expiry_s,
            protocol=MQTTProtocolVersion.MQTTv5,
            manual_ack=manual_ack,
        )
        self._link = Link(self._options, self)
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{client_id}", daemon=True)
        self._first_outcome = threading.Event()
        self._failure = ""
        self._failure_hint = ""

        self._lock = threading.Lock()
        self._wake_fd = -1
        # Whether the network thread waits, and whether something was queued since it looked at the queues.
        self._asleep = self._news = self._gathers = False
        self._queue: deque[Publish] = deque()
        self._waiting_bytes = 0
        self._requests: deque[tuple[str, bool]] = deque()
        self._filters: tuple[str, ...] = ()
        self._exact = ExactTopics()
        self._started = self._closing = False
        self._close_by_s = 0.0
        self._handled: deque[_Receipt] = deque()

        # Written by the network thread alone.
        self._witness = witness
        self._rivals: RivalWatch | None = None
        self._beside: MqttTransport | None = None
        self._taken_over = False
        self._born_s = 0.0
        self._takeovers = 0
        self._silent = False
        self._ever_online = False
        self._told_offline = ""
        self._online_since_s = 0.0
        self._ends_s: deque[float] = deque(maxlen=MANY_ENDS)
        self.bytes_sent = self.bytes_received = 0
        self._connection = 0
        self._unhandled_bytes = 0

    def __repr__(self) -> str:
        return f"MqttTransport({self.address}, client_id={self.client_id!r})"

    @property
    def protocol_version(self) -> str:
        """The MQTT version in use: ``5`` or ``3.1.1``."""
        return "5" if self._options.protocol == MQTTProtocolVersion.MQTTv5 else "3.1.1"

    def start(self, *, require: bool = False) -> None:
        """Begin to connect and return at once; with ``require``, return once the first connection is accepted.

        Raises:
            BrokerUnreachableError: only with ``require``: the first connection failed or was not accepted within
                CONNECT_TIMEOUT_S. The transport is then closed.
            UsageError: the transport was started before.
        """
        if self._started or self._closing:
            raise UsageError(f"transport {self.client_id!r} was started before", hint="make a new one")
        self._started = True
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # With this object, not with its thread: `_waking` must never write to a descriptor that was given to another file.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False
        self._thread.start()
        if not require:
            return
        in_time = self._first_outcome.wait(limits.CONNECT_TIMEOUT_S)
        failure = self._failure if in_time else f"no answer in {limits.CONNECT_TIMEOUT_S:g} s"
        if failure:
            # With an empty queue `close` has nothing to wait for.
            with self._lock:
                self._queue.clear()
            self.close()
            raise BrokerUnreachableError(
                f"no MQTT broker can be used at {self.address.place}: {failure}",
                hint=self._failure_hint
                or "check the address, that the broker runs, and the user, password or certificate that it asks for",
            )

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of a chunk within the setting, the pace and the broker's packet limit.

        The broker announces its limit in CONNACK (MQTT 5 only), or refuses what is larger.
        """
        most = chunk_bytes_within(min(self._link.max_packet_bytes, self._link.learned_bytes))
        return max(MIN_CHUNK_BYTES, min(most, self.address.chunk_bytes, self._pace.most_chunk_bytes))

    def publish(self, topic: str, payload: bytes | Chunk, *, retain: bool = False, qos: Qos = 1) -> None:
        """Queue a message for the broker, also while offline; never blocks.

        Raises:
            WireError: the packet is above MAX_PACKET_BYTES or the broker's limit, the topic is not publishable, the queue
                is full, or the transport is closed. What is published between a takeover and `TakenOver` is dropped.
        """
        check_publish(topic, payload, self._link.max_packet_bytes)
        with self._waking():
            if self._taken_over:
                return
            if self._closing:
                raise WireError("the transport is closed")
            if self._waiting_bytes + len(payload) > self._max_queued_bytes:
                raise WireError(
                    f"{self._waiting_bytes} bytes already wait for the broker", hint="look at pending() first"
                )
            self._waiting_bytes += len(payload)
            self._queue.append(Publish(topic, payload, retain, qos))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wake the network thread once for all that the block queues."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            with self._waking():
                pass

    def subscribe(self, topic_filter: str) -> None:
        """Subscribe to ``topic_filter``, now and after every reconnection; a repeated call requests what is retained again."""
        self._request(topic_filter, wanted=True)

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe from ``topic_filter``."""
        self._request(topic_filter, wanted=False)

    def pending(self) -> int:
        """Return the number of unacknowledged publishes; one at QoS 0 counts until the broker's machine has received it."""
        with self._lock:
            return len(self._queue) + self._link.inflight

    def close(self) -> None:
        """Send the queue for at most FLUSH_S, disconnect and stop; the sink is not called afterwards."""
        self.leave(FLUSH_S)
        if self._started and threading.current_thread() is not self._thread:
            self._thread.join(FLUSH_S + limits.CONNECT_TIMEOUT_S)
            self._silent = True

    def leave(self, flush_s: float) -> None:
        """Begin to close, without a wait: the queue is sent for at most ``flush_s`` seconds."""
        with self._waking():
            if not self._closing:
                self._closing = True
                self._close_by_s = time.monotonic() + flush_s

    def on_online(self, *, session_present: bool) -> None:
        """Report `Connected`, then restore the subscriptions; the link calls this inside a step."""
        with self._lock:
            requests = dict(self._requests)
            known = [topic_filter for topic_filter in self._filters if topic_filter not in requests]
            self._requests.clear()
        self._online_since_s = time.monotonic()
        self._born_s = self._born_s or self._online_since_s
        if self._told_offline:
            self._told_offline = ""
            _log.info("connected to %s again", self.address)
        self._emit(Connected(session_present, self._link.expires_at_s))
        # A session that survived gets no retained messages for old filters again, but for those requested while offline.
        self._link.subscribe(known, only_new=self._ever_online)
        for topic_filter, wanted in requests.items():
            if wanted:
                self._link.subscribe((topic_filter,))
            else:
                self._link.unsubscribe(topic_filter)
        self._ever_online = True
        self._first_outcome.set()

    def on_message(self, message: MQTTMessage) -> None:
        """Report a received publish, unless it matches no subscription; the link calls this inside a step.

        amqtt sends a reconnecting client the retained messages of all clients' subscriptions, at QoS 0.
        """
        try:
            topic = message.topic
        except UnicodeDecodeError:
            _log.warning("a message on a topic that is no UTF-8 was ignored")
            if self._manual_ack and message.qos:
                self._link.acknowledge(message.mid)
            return
        if message.retain and message.qos == 0 and not any(matches(wanted, topic) for wanted in self._filters):
            return  # at QoS 0 there is nothing to acknowledge
        if message.retain and not message.dup:
            with self._lock:
                self._requests.extend(self._exact.arrived(topic))
        payload = bytes(message.payload)
        self.bytes_received += len(payload)
        if not self._manual_ack:
            self._emit(Message(topic, payload, message.retain))
            return
        receipt = _Receipt(self._connection, message.mid, message.qos, len(payload) + limits.MESSAGE_OVERHEAD_BYTES)
        self._unhandled_bytes += receipt.bytes
        self._emit(Message(topic, payload, message.retain, partial(self._on_handled, receipt)))

    def _on_handled(self, receipt: _Receipt) -> None:
        """Queue an acknowledgement for the network thread; called from the thread that handles messages."""
        with self._waking():
            self._handled.append(receipt)

    def _acknowledge(self, link: Link) -> None:
        """Send the queued acknowledgements, except those of an earlier connection, whose messages the broker sends again."""
        while self._handled:
            with self._lock:
                receipts = tuple(self._handled)
                self._handled.clear()
            for receipt in receipts:
                self._unhandled_bytes -= receipt.bytes
                if receipt.qos and receipt.connection == self._connection:
                    link.acknowledge(receipt.packet_id)

    def on_settled(self, size: int) -> None:
        """Subtract a publish that is done from the queued bytes; the link calls this on the network thread."""
        with self._lock:
            self._waiting_bytes -= size

    def _request(self, topic_filter: str, *, wanted: bool) -> None:
        with self._waking():
            others = tuple(known for known in self._filters if known != topic_filter)
            again = len(others) < len(self._filters)
            self._filters = (*others, topic_filter) if wanted else others
            self._requests.append((topic_filter, wanted))
            exact = self._exact
            self._requests += exact.requested(topic_filter, again=again) if wanted else exact.dropped(topic_filter)

    @contextmanager
    def _waking(self) -> Iterator[None]:
        """Hold the lock inside the block, which queues something; then interrupt the network thread's wait, if it waits.

        One wake-up is enough: the network thread then takes all that is queued. It needs the lock, so it is woken without it.
        """
        with self._lock:
            yield
            waits = self._asleep and not self._gathers
            self._news, self._asleep = True, self._asleep and not waits
        if waits:
            os.eventfd_write(self._wake_fd, 1)

    def _falls_asleep(self) -> bool:
        """Return whether the network thread may wait: nothing was queued since it looked."""
        with self._lock:
            self._asleep = not self._news
            return self._asleep

    def _emit(self, event: TransportEvent) -> None:
        if not self._silent:
            self._sink(event)

    def _speak(self, protocol: MQTTProtocolVersion) -> None:
        self._options = dataclasses.replace(self._options, protocol=protocol)
        self._link = Link(self._options, self)

    def _run(self) -> None:
        """Connect, serve and reconnect until closed or taken over; the network thread's target."""
        attempt = 0
        try:
            while not self._finished():
                link = self._link
                self._connect_and_serve()
                if self._fall_back():
                    continue
                reason, hint = link.reason, link.hint or HINTS.get(link.reason_code or 0, "")
                if link.was_online and not self._closing:
                    attempt, reason = self._look_back(attempt)
                if not self._ever_online:
                    self._failure, self._failure_hint = reason, hint
                    self._first_outcome.set()
                if not self._closing:
                    self._tell_offline(reason, hint, was_online=link.was_online)
                self._pause(backoff_s(attempt, *self._reconnect_s, uniform))
                attempt += 1
            if self._taken_over:
                _log.error("another program uses the id %s: stopped", self.client_id)
                self._emit(TakenOver())
        finally:
            self._leave_rivals()
            with self._lock:
                self._closing = True
                self._asleep = False

    def _tell_offline(self, reason: str, hint: str, *, was_online: bool) -> None:
        """Report why there is no connection: each end of one, and each failed attempt with another reason than the one before."""
        said = f"{reason}; {hint}" if hint else reason
        new = was_online or said != self._told_offline
        if new and hint:
            _log.warning("not connected to %s: %s; %s", self.address.place, reason, hint)
        else:
            _log.info("not connected to %s: %s", self.address.place, said)
        self._told_offline = said
        if new:
            self._emit(Disconnected(said) if was_online else Unreached(said))

    def _connect_and_serve(self) -> None:
        """Open the link and step it until its connection ends."""
        link = self._link
        self._connection += 1
        if not link.open():
            return
        answer_by_s = time.monotonic() + self._patience_s()
        parting = False
        while link.alive:
            self._asleep = self._news = False
            if self._rivals is not None and self._rivals.over:
                self._leave_rivals()
            self._acknowledge(link)
            if link.online:
                self._feed(link)
            if self._finished() and not parting:
                parting = True
                link.goodbye()
            elif parting and time.monotonic() >= self._close_by_s:
                link.abort("closed")
            if link.alive:
                left_s = _TICK_S if link.online else answer_by_s - time.monotonic()
                # While closing, only the broker's acknowledgements matter, and they must be read.
                read = self._closing or not link.online or self._unhandled_bytes < limits.MAX_UNHANDLED_BYTES
                wait_s = max(0.0, min(left_s, _CLOSING_TICK_S if self._closing else _TICK_S))
                if self._queue:
                    wait_s = min(wait_s, self._pace.wait_s(time.monotonic()) or wait_s)
                link.step(self._wake_fd, wait_s * self._falls_asleep(), read=read)
            if not link.online and time.monotonic() >= answer_by_s:
                link.abort("the broker did not answer the greeting")

    def _patience_s(self) -> float:
        """Return the longest wait for the broker's answer to CONNECT."""
        if self._options.protocol != MQTTProtocolVersion.MQTTv5 or self._ever_online:
            return limits.CONNECT_TIMEOUT_S
        return HANDSHAKE_LOOPBACK_S if self.address.is_loopback else HANDSHAKE_S

    def _feed(self, link: Link) -> None:
        """Pass queued requests to the link, and publishes as far as its window allows."""
        while self._requests:
            with self._lock:
                topic_filter, wanted = self._requests.popleft()
            if wanted:
                link.subscribe((topic_filter,))
            else:
                link.unsubscribe(topic_filter)
        while link.has_room:
            with self._lock:
                if not self._queue or self._pace.wait_s(time.monotonic()):
                    return
                message = self._queue.popleft()
                size = len(message.payload)
                if link.takes(message):
                    if not link.publish(message):
                        self._queue.appendleft(message)
                        return
                    self.bytes_sent += size
                    self._pace.sent(size, time.monotonic())
                else:
                    self._waiting_bytes -= size
                    _log.error("dropped %d bytes for %s: queued before the broker told its limit", size, message.topic)

    def _finished(self) -> bool:
        """Return whether the transport is closing and the queue is empty or the time for it has run out."""
        return self._closing and (self.pending() == 0 or time.monotonic() >= self._close_by_s)

    def _look_back(self, attempt: int) -> tuple[int, str]:
        """Judge a connection that has ended; return the number of the next attempt to connect, and why it ended."""
        link, now_s = self._link, time.monotonic()
        lived_s = now_s - self._online_since_s
        taken_over = link.reason_code == SESSION_TAKEN_OVER
        # A connection that we cut was not ended by another client: the cause was the broker's data or silence.
        if not link.cut:
            self._ends_s.append(now_s)
        if self._shrink() or (lived_s >= SHORT_LIFE_S and not taken_over):
            attempt = 0
        if taken_over:
            self._note_takeover()
        elif len(self._ends_s) == MANY_ENDS and now_s - self._ends_s[0] <= ENDS_S:
            self._look_for_rivals()
            last = link.last or "none"
            return attempt, f"{link.reason}: the broker ends our connections; the last packet sent: {last}"
        return attempt, link.reason

    def _note_takeover(self) -> None:
        """Count a connection that MQTT 5 says another client took over.

        The program that began later gives way: presences tell which one that is. Where there are none, it is the one that began
        in the last minute. With presences one alone ends nobody: it may be due to a greeting of our own that came late.
        """
        self._takeovers += 1
        most = 1 if self._witness is None else 2 * MANY_ENDS
        if self._takeovers >= most and time.monotonic() - self._born_s <= WATCH_S:
            self._give_way()
        else:
            self._look_for_rivals()

    def _look_for_rivals(self) -> None:
        """Open a second connection on which a rival is heard, unless there is one."""
        if self._witness is None or self._beside is not None:
            return
        self._rivals = RivalWatch(self._witness, self._give_way)
        client_id = f"{self.client_id}-{secrets.token_hex(4)}"
        self._beside = MqttTransport(self.address, client_id, self._rivals.on_event, session_expiry_s=0)
        self._rivals.follow(self._beside)
        self._beside.start()

    def _leave_rivals(self) -> None:
        if self._beside is not None:
            self._beside.leave(0.0)
            self._beside = self._rivals = None

    def _give_way(self) -> None:
        """End at once: a program that began earlier has our identity."""
        self._taken_over = True
        self.leave(0.0)

    def _shrink(self) -> bool:
        """Use smaller packets if the broker takes none of the size that it was sent last; return whether that is so."""
        left = self._link.shrink()
        if left is None:
            return False
        _log.warning("the broker takes no larger packets: chunks have %d bytes from now on", self.chunk_bytes)
        with self._lock:
            self._queue.extendleft(reversed(left))
        return True

    def _fall_back(self) -> bool:
        """Change the MQTT version if that may be why no connection was ever accepted; return whether to retry at once."""
        if self._ever_online:
            return False
        # 3.1.1 failed as well, so the version was not the cause: begin again with 5, after the usual wait.
        if self._options.protocol != MQTTProtocolVersion.MQTTv5:
            self._speak(MQTTProtocolVersion.MQTTv5)
            return False
        in_doubt = self._link.greeted and self._link.reason_code in UNSUPPORTED_VERSIONS
        if in_doubt:
            self._speak(MQTTProtocolVersion.MQTTv311)
        return in_doubt

    def _pause(self, seconds: float) -> None:
        """Wait ``seconds``, or less if the transport is being closed."""
        until_s = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        while not self._finished():
            limit_s = min(until_s, self._close_by_s) if self._closing else until_s
            left_ms = (limit_s - time.monotonic()) * 1000.0
            if left_ms <= 0.0:
                return
            # Reading resets the eventfd, or the next poll would return at once.
            for fd, _ in poller.poll(left_ms * self._falls_asleep()):
                os.eventfd_read(fd)
            self._asleep = self._news = False
