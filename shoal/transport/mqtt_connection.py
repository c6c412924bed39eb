"""One paho client without paho's own loop: shoal/transport/mqtt.py's network thread opens it and steps it.

paho's ``loop_start`` works only with file descriptors below 1024, always reads, has no jitter and can't change the protocol
version (ADR 24); ``loop_read``, ``loop_write`` and ``loop_misc`` are its interface for other loops. Nothing here is
thread-safe.

Example: after ``link.open()``, call ``link.step(wake_fd, 1.0)`` while ``link.alive``; the callbacks of `LinkEvents` run inside
these calls.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MessageType, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from shoal import limits
from shoal.address import BrokerAddress
from shoal.protocol.chunking import PACKET_ROOM_BYTES, Chunk
from shoal.transport.base import Qos, Will, packet_bytes
from shoal.transport.reasons import why
from shoal.transport.websocket import WebSocket, connected, expiry_of

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger(__name__)

WINDOW: Final = 32
"""Most publishes inside paho at a time: 4 MB of 120 KiB chunks, enough for 1 Gbit/s over 30 ms of delay."""

TCP_TIMEOUT_S: Final = 5.0
"""Timeout of each of the handshakes of TCP, proxy, TLS and websocket."""

CHOKES: Final = 2
"""So many connections in a row that end over packets of a new size show that the broker refuses them; one may be an accident."""

LEAST_PACKET_BYTES: Final = limits.LEAST_CHUNK_BYTES + PACKET_ROOM_BYTES
"""Shoal needs packets of this size: presences, notes and their topics are not divided into chunks."""

READ_AHEAD_BYTES: Final = 4096
"""Bytes read at once where paho asks for fewer. It reads a packet's header byte by byte, in four system calls, at each of which
the thread may have to wait for the interpreter's lock."""

BUFFER_BYTES: Final = 124 * 1024
"""The same without TLS and websocket: a chunk of the usual size takes one system call."""

PACKET_TOO_LARGE: Final = 0x95
NO_RETAINED_MESSAGES: Final = 0x9A
NO_RETAINED: Final = "it keeps no retained messages"
_PUBACK_CODES: Final = (0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)
"""Reason codes of MQTT 5 for a PUBACK. paho raises at any other, such as mosquitto's `packet too large`."""

_BROKEN_STREAM: Final = (ValueError, IndexError, KeyError, struct.error)
"""Exceptions of paho for bytes that are not MQTT."""


class Publish(NamedTuple):
    """A message to send to the broker."""

    topic: str
    payload: bytes | Chunk
    retain: bool
    qos: Qos


class LinkEvents(Protocol):
    """Callbacks of a link, called on the thread that steps it."""

    def on_online(self, *, session_present: bool) -> None:
        """Handle an accepted connection: subscriptions are possible from now on."""

    def on_message(self, message: MQTTMessage) -> None:
        """Handle a received publish."""

    def on_settled(self, size: int) -> None:
        """Handle the end of a publish of ``size`` payload bytes: acknowledged, or at QoS 0 sent or lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Options of a link, the same for all its connections.

    Attributes:
        address: the broker.
        tls: TLS context; None for a connection without TLS.
        client_id: names the session.
        will: topic and payload of the retained will.
        session_expiry_s: time for which the broker stores the session of a lost connection; over 3.1.1 only 0 or not matters.
        protocol: the MQTT version to speak.
        manual_ack: acknowledge received publishes by `Link.acknowledge`, not on arrival.
    """

    address: BrokerAddress
    tls: ssl.SSLContext | None
    client_id: str
    will: Will | None
    session_expiry_s: int
    protocol: MQTTProtocolVersion
    manual_ack: bool = False


class _BoundedClient(Client):
    """paho's client with a limit on received packets, and with one copy of a received payload.

    paho itself buffers up to 256 MB, above the limit that we announced. It copies a payload five times, and makes an object with
    every property that MQTT 5 knows for each packet: more CPU than all else that a received packet costs. When a socket has no
    bytes, paho asks ssl for its exceptions, which loads ssl in a program that has put it off; here only a TLS socket does.

    Attributes:
        overrun: whether a packet above the limit ended the connection.
        ahead: bytes of this connection that were read before paho asked for them.
        verdict: the reason code of the newest PUBACK as the broker sent it.
        fault: the error of TLS that ended the connection; None if none did.
        expires_at_s: unix seconds at which the broker's certificate expires; None without TLS.
    """

    overrun = False
    ahead: bytes | memoryview = b""
    verdict = 0
    fault: OSError | None = None
    expires_at_s: int | None = None

    def __init__(self, address: BrokerAddress, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, transport="websockets" if address.path else "tcp", **options)
        self._address, self._tls = address, tls
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def _create_socket(self) -> Any:
        path, tls = self._address.path, self._tls
        sock: Any = connected((self._host, self._port), self._address.proxy, TCP_TIMEOUT_S)
        try:
            if tls is not None:  # ours closes the connection where the handshake fails; paho's does not
                sock = tls.wrap_socket(sock, server_hostname=self._host)
                self.expires_at_s = expiry_of(sock)
            if not path:
                return sock
            return WebSocket(sock, self._host, self._port, path, tls=tls is not None, timeout_s=TCP_TIMEOUT_S)
        except OSError:
            sock.close()
            raise

    def _sock_recv(self, bufsize: int) -> Any:
        length = self._in_packet["remaining_length"]
        if self._in_packet["have_remaining"] and length > limits.MAX_PACKET_BYTES:
            _log.error("the broker sent a packet of %d bytes, over the limit of %d", length, limits.MAX_PACKET_BYTES)
            self.overrun = True
            raise ConnectionError("a packet above the limit")
        if not self.ahead:
            self.ahead = self._received(max(bufsize, READ_AHEAD_BYTES))
        data, self.ahead = self.ahead[:bufsize], self.ahead[bufsize:]
        return data

    def _received(self, most: int) -> bytes | memoryview:
        sock: Any = self._sock
        if self._ssl or sock is None:
            try:
                return super()._sock_recv(most)
            except BlockingIOError:
                raise
            except OSError as error:
                self.fault = error
                raise
        if self._address.path:
            data: bytes = sock.recv(most)
            return data
        return self._buffer[: sock.recv_into(self._buffer)]  # paho copies each part before it asks for the next

    def _packet_write(self) -> MQTTErrorCode:
        """Write the queued packets; acknowledgements at the head of the queue become one."""
        queue = self._out_packet
        while len(queue) > 1 and queue[0]["command"] == queue[1]["command"] == MessageType.PUBACK:
            first, second = queue.popleft(), queue[0]
            second["packet"] = first["packet"][first["pos"] :] + second["packet"]
            second["to_process"] += first["to_process"]
        return super()._packet_write()

    def _sock_send(self, buf: bytes | bytearray) -> int:
        sock: Any = self._sock
        if self._ssl or sock is None:
            return super()._sock_send(buf)
        # The kernel fills a segment with the packets that follow.
        more = (socket.MSG_MORE,) if self._out_packet and not self._address.path else ()
        try:
            return int(sock.send(buf, *more))
        except BlockingIOError:
            self._call_socket_register_write()
            raise

    def _handle_pubackcomp(self, cmd: Literal["PUBACK", "PUBCOMP"]) -> MQTTErrorCode:
        packet = self._in_packet["packet"]
        self.verdict = packet[2] if len(packet) > 2 else 0
        if self.verdict not in _PUBACK_CODES:
            packet[2] = 0x80  # unspecified error
        return super()._handle_pubackcomp(cmd)

    def _handle_publish(self) -> MQTTErrorCode:
        command, packet = self._in_packet["command"], self._in_packet["packet"]
        qos = command >> 1 & 3
        topic_end = 2 + int.from_bytes(packet[:2], "big")
        head_end = topic_end + (2 if qos else 0)
        # The byte after the head is the length of the properties. A packet with properties, or a broken one, is paho's.
        if self._protocol != MQTTProtocolVersion.MQTTv5 or qos > 1 or packet[head_end : head_end + 1] != b"\0":
            return super()._handle_publish()
        message = MQTTMessage(int.from_bytes(packet[topic_end:head_end], "big"), bytes(packet[2:topic_end]))
        message.dup, message.qos, message.retain = bool(command & 8), qos, bool(command & 1)
        with memoryview(packet) as view:
            message.payload = bytes(view[head_end + 1 :])
        self._handle_on_message(message)
        return self._send_puback(message.mid) if qos and not self._manual_ack else MQTTErrorCode.MQTT_ERR_SUCCESS


class Link:
    """A paho client, its connection and the publishes inside it.

    A link has one connection after the other, each of which passes through these stages:

        `open` succeeds              ``alive`` and ``greeted``: the socket is connected, CONNECT is sent
        the broker accepts           ``online`` and ``was_online``: publishes and subscriptions are possible
        the connection has ended     neither ``alive`` nor ``online``; ``reason`` says why

    Publishes at QoS 1 outlast a connection: paho resends them over the next. Those at QoS 0 that paho has not written are given
    up, and count as settled, when the link is opened again.

    Attributes:
        online: whether the broker accepted this connection and it has not ended.
        was_online: whether the broker accepted this connection at some time.
        greeted: whether the TCP or TLS connection was made and CONNECT sent.
        reason: why the connection ended or was refused; empty while it is open.
        hint: what to do about it; empty if that is not known.
        reason_code: MQTT 5's code for that; None if the broker sent none.
        cut: whether we ended the connection because of invalid, oversized or missing data from the broker.
        max_packet_bytes: largest packet that the broker accepts, as it says itself.
        learned_bytes: the same as its refusals have shown, see `shrink`.
        taken_bytes: largest publish at QoS 1, in bytes of its packet, that the broker has acknowledged.
        last: size of the newest publish of this connection, in words; empty before the first.
    """

    def __init__(self, options: LinkOptions, events: LinkEvents) -> None:
        self.online = False
        self.was_online = False
        self.greeted = False
        self.reason = self.hint = ""
        self.reason_code: int | None = None
        self.cut = False
        self.max_packet_bytes: int = limits.MAX_PACKET_BYTES
        self.learned_bytes: int = limits.MAX_PACKET_BYTES
        self.taken_bytes = 0
        self.last = ""
        # Packet bytes of a publish that the broker refused as too large, and connections that ended over large ones.
        self._refused_bytes = self._choked = 0
        # The largest packet of this connection at QoS 0, and whether a connection ended after such a packet of a new size.
        self._at_qos_0, self._in_doubt = 0, False
        # Why the next step is to cut the connection; paho must not be cut inside its own callbacks.
        self._doom = ""
        self._options = options
        self._events = events
        self._window = WINDOW
        # At QoS 1: packet id -> publish, until the broker acknowledges it.
        self._unacknowledged: dict[int, Publish] = {}
        # At QoS 0: (packet id, payload bytes), oldest first, until paho has written the publish.
        self._unwritten: deque[tuple[int, int]] = deque()
        # Whether this connection's send buffer may hold bytes of a publish at QoS 0.
        self._wrote_qos_0 = False
        self._opened_before = False
        self._client = self._make_client()

    @property
    def alive(self) -> bool:
        """Whether the link has a socket."""
        return self._client.socket() is not None

    @property
    def expires_at_s(self) -> int | None:
        """Unix seconds at which the certificate of the broker expires; None without TLS."""
        return self._client.expires_at_s

    @property
    def inflight(self) -> int:
        """Number of unacknowledged publishes; at QoS 0 one more until the broker's machine has received all that were sent."""
        in_send_buffer = self._wrote_qos_0 and _unreceived_bytes(self._client.socket()) > 0
        return self._in_paho + in_send_buffer

    @property
    def has_room(self) -> bool:
        """Whether the window allows another publish."""
        return self.online and self._in_paho < self._window

    @property
    def _in_paho(self) -> int:
        """Number of publishes inside paho."""
        return len(self._unacknowledged) + len(self._unwritten)

    def open(self) -> bool:
        """Connect the socket and send CONNECT; paho resends unacknowledged publishes once the broker accepts.

        Returns:
            Whether the TCP or TLS connection was made; if not, ``reason`` holds the error.
        """
        self.online = self.was_online = self.greeted = self.cut = False
        self.reason, self.hint, self.reason_code, self.last, self._doom = "", "", None, "", ""
        self._client.overrun, self._client.ahead, self._client.fault = False, b"", None
        self._wrote_qos_0 = False
        # paho drops publishes at QoS 0 when it reconnects, so those not written yet are lost.
        while self._unwritten:
            self._events.on_settled(self._unwritten.popleft()[1])
        if not self._opened_before:
            self._opened_before = True
            self._store_greeting()
        try:
            self._client.reconnect()
        except OSError as error:
            self.reason, self.hint = why(error, self._options.address)
        else:
            self.greeted = True
        return self.greeted

    def _store_greeting(self) -> None:
        """Give paho the address and CONNECT's properties: connect_async() only stores them, and reconnect() uses them."""
        address = self._options.address
        if not self._is_v5:
            self._client.connect_async(address.host, address.port, limits.KEEPALIVE_S)
            return
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = self._options.session_expiry_s
        properties.ReceiveMaximum = limits.RECEIVE_MAXIMUM
        properties.MaximumPacketSize = limits.MAX_PACKET_BYTES
        self._client.connect_async(
            address.host, address.port, limits.KEEPALIVE_S, clean_start=False, properties=properties
        )

    def step(self, wake_fd: int, timeout_s: float, *, read: bool = True) -> None:
        """Write, wait for the socket, ``wake_fd`` or ``timeout_s`` seconds, read (unless ``read`` is false) and write."""
        try:
            if self.online:  # before that a refusal is read first: it says more than a write that fails
                self._client.loop_write()
            sock: Any = self._client.socket()
            if sock is None:  # the write failed, or was the last
                return
            poller = select.poll()
            poller.register(wake_fd, select.POLLIN)
            poller.register(sock, (select.POLLIN if read else 0) | (select.POLLOUT if self._client.want_write() else 0))
            # Bytes that the TLS layer has decrypted already, or that were read ahead, don't make the socket readable.
            readable = read and (bool(self._client.ahead) or (self._options.tls is not None and sock.pending() > 0))
            for fd, conditions in poller.poll(0 if readable else timeout_s * 1000.0):
                if fd == wake_fd:
                    os.eventfd_read(wake_fd)
                    continue
                # An error or a hang-up, which poll reports unasked, is read as well: paho then ends the connection.
                readable = readable or bool(conditions & ~select.POLLOUT)
            if readable:
                self._client.loop_read()
            if self._doom:
                self.abort(self._doom)
                return
            self._client.loop_misc()
            self._client.loop_write()
        except _BROKEN_STREAM:
            _log.exception("broken MQTT stream: the connection is dropped")
            self.abort("the broker sent what is no MQTT")

    def takes(self, message: Publish) -> bool:
        """Return whether the broker accepts a publish of this size, as far as is known."""
        return _size(message) <= min(self.max_packet_bytes, self.learned_bytes)

    def shrink(self) -> list[Publish] | None:
        """Halve `learned_bytes` if the connection that has ended, and the one before, did so over publishes of a new size.

        A broker need not tell its limit: it may refuse a packet, or end the connection at it. A size that it has taken before is
        never to blame. paho would send the same packets again for ever, so it is made anew.

        Returns:
            The publishes that the broker has not acknowledged, oldest first, to be sent again if it takes them; None if the
            limit stays.
        """
        self._in_doubt = self._in_doubt or self._at_qos_0 > self._proven
        self._at_qos_0 = 0
        heavy = max([size for each in self._unacknowledged.values() if (size := _size(each)) > self._proven], default=0)
        refused = bool(self._refused_bytes) or self.reason_code == PACKET_TOO_LARGE
        heavy, self._refused_bytes = max(heavy, self._refused_bytes), 0
        self._choked = self._choked + 1 if heavy else 0
        if not heavy or not (refused or self._choked >= CHOKES):
            return None
        self.taken_bytes *= not refused
        self._choked, self.learned_bytes = 0, max(self._proven, heavy // 2)
        left = list(self._unacknowledged.values())
        self._unacknowledged.clear()
        self._client, self._opened_before = self._make_client(), False
        return left

    @property
    def _proven(self) -> int:
        """Packets of at most so many bytes are not why the broker ends a connection."""
        return max(self.taken_bytes, LEAST_PACKET_BYTES)

    def publish(self, message: Publish) -> bool:
        """Pass a publish to paho; return False if paho has no free packet id for it."""
        size = _size(message)
        # An acknowledgement shows whether the broker takes packets of this size.
        qos = 1 if self._in_doubt and size > self._proven else message.qos
        info = self._client.publish(message.topic, bytes(message.payload), qos=qos, retain=message.retain)
        if info.rc == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
            return False
        self.last = f"{size} bytes, retained" if message.retain else f"{size} bytes"
        if qos == 0:
            self._at_qos_0 = max(self._at_qos_0, size)
            self._unwritten.append((info.mid, len(message.payload)))
        else:
            self._unacknowledged[info.mid] = message
        return True

    def acknowledge(self, packet_id: int) -> None:
        """Acknowledge a handled publish of QoS 1 to the broker; only with `LinkOptions.manual_ack`."""
        self._client.ack(packet_id, 1)

    def subscribe(self, filters: Iterable[str], *, only_new: bool = False) -> None:
        """Subscribe with QoS 1; with ``only_new``, MQTT 5 sends retained messages only if the session lacks the filter."""
        options = SubscribeOptions(qos=1, retainHandling=1 if only_new else 0) if self._is_v5 else None
        for topic_filter in filters:
            self._client.subscribe(topic_filter, qos=0 if options else 1, options=options)

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._client.unsubscribe(topic_filter)

    def goodbye(self) -> None:
        """Send DISCONNECT, so that the broker discards the will; the socket closes once it is written."""
        self._client.disconnect()

    def abort(self, reason: str) -> None:
        """Cut the connection; the broker publishes the will."""
        self.cut = True
        sock: Any = self._client.socket()
        if sock is None:
            return
        self.reason = self.reason or reason
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("shutdown of a dead socket: %s", error)
        # paho notices the shutdown and releases the socket when it fails to write DISCONNECT. It leaves that write to us, since
        # we have registered `_defer_write`.
        self._client.disconnect()
        if self.alive:
            self._client.loop_write()

    @property
    def _is_v5(self) -> bool:
        return self._options.protocol == MQTTProtocolVersion.MQTTv5

    def _make_client(self) -> _BoundedClient:
        options = self._options
        client = _BoundedClient(
            options.address,
            options.tls,
            client_id=options.client_id,
            # paho refuses this argument with MQTT 5, where clean_start takes its place.
            clean_session=None if self._is_v5 else options.session_expiry_s == 0,
            protocol=options.protocol,
            reconnect_on_failure=False,
            manual_ack=options.manual_ack,
        )
        client.connect_timeout = TCP_TIMEOUT_S
        # No limit: WINDOW is one already, and with one of its own paho scans all its messages at every acknowledgement.
        client.max_inflight_messages_set(0)
        if options.address.username:
            client.username_pw_set(options.address.username, options.address.password or None)
        if options.tls is not None:
            client.tls_set_context(options.tls)
        if options.will is not None:
            client.will_set(options.will[0], options.will[1], qos=1, retain=True)
        client.on_socket_open = _no_delay
        client.on_socket_register_write = _defer_write
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        return client

    def _on_connect(
        self, _client: Client, _data: Any, flags: ConnectFlags, code: ReasonCode, properties: Properties | None
    ) -> None:
        if code.is_failure:
            self.reason, self.reason_code = f"the broker refused: {_words(code)}", code.value
            return
        # A broker without such limits leaves the property out, and over 3.1.1 there are no properties.
        self._window = min(WINDOW, getattr(properties, "ReceiveMaximum", WINDOW))
        brokers_limit = getattr(properties, "MaximumPacketSize", limits.MAX_PACKET_BYTES)
        self.max_packet_bytes = min(limits.MAX_PACKET_BYTES, brokers_limit)
        if getattr(properties, "RetainAvailable", 1) == 0:
            self._doom, self.reason_code = f"the broker said: {NO_RETAINED}", NO_RETAINED_MESSAGES
            return
        self.online = self.was_online = True
        self._events.on_online(session_present=flags.session_present)

    def _on_disconnect(
        self, _client: Client, _data: Any, flags: DisconnectFlags, code: ReasonCode, _properties: Properties | None
    ) -> None:
        self.online = False
        if self._client.overrun:
            self.cut, self.reason = True, "the broker sent a packet above the limit"
        elif self._client.fault is not None and not self.reason:
            self.reason, self.hint = why(self._client.fault, self._options.address)
        if flags.is_disconnect_packet_from_server:
            self.reason, self.reason_code = f"the broker said: {_words(code)}", code.value
        else:
            self.reason = self.reason or ("closed" if not code.is_failure else "connection lost")

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        self._events.on_message(message)

    def _on_publish(self, _client: Client, _data: Any, mid: int, code: ReasonCode, _properties: Properties) -> None:
        publish = self._unacknowledged.pop(mid, None)
        if self._client.verdict == PACKET_TOO_LARGE and publish is not None:
            self._refused_bytes = max(self._refused_bytes, _size(publish))
            self._doom = f"the broker takes no packet of {self._refused_bytes} bytes"
        elif code.is_failure:
            _log.error("the broker refused a publish: %s", code)
        elif publish is not None:
            self.taken_bytes = max(self.taken_bytes, _size(publish))
        if self._unwritten and self._unwritten[0][0] == mid:
            self._wrote_qos_0 = True
            self._events.on_settled(self._unwritten.popleft()[1])
        elif publish is not None:
            self._events.on_settled(len(publish.payload))

    def _on_subscribe(
        self, _client: Client, _data: Any, _mid: int, codes: list[ReasonCode], _properties: Properties | None
    ) -> None:
        for code in codes:
            if code.is_failure:
                _log.error("the broker refused a subscription: %s", code)


def _words(code: ReasonCode) -> str:
    return NO_RETAINED if code.value == NO_RETAINED_MESSAGES else str(code)


def _size(message: Publish) -> int:
    return packet_bytes(message.topic, message.payload)


def _unreceived_bytes(sock: Any) -> int:
    """Return the number of bytes in the send buffer that the peer's TCP has not acknowledged; 0 without a connection."""
    count = bytearray(4)
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    except (AttributeError, OSError, ValueError):
        return 0
    return int.from_bytes(count, sys.byteorder)


def _no_delay(_client: Client, _data: Any, sock: Any) -> None:
    """Disable Nagle's algorithm, which adds 92 ms to every QoS 1 round trip."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _defer_write(_client: Client, _data: Any, _socket: Any) -> None:
    """Do nothing: a registered callback keeps paho from writing each packet at once; `Link.step` writes them together."""
