"""Acknowledgement of received messages after they were handled, and the bound on those that wait."""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from shoal import limits
from shoal.transport.base import Connected, Disconnected, Message, TakenOver
from shoal.transport.inbox import Inbox
from shoal.transport.mqtt import MANY_ENDS, MqttTransport
from tests.helpers.scripted_broker import ACCEPT_V5, ScriptedBroker, hold
from tests.helpers.waiting import until

PUBACK = 0x40
CHUNK = bytes(100_000)


def publish_packet(payload: bytes, *, packet_id: int = 0) -> bytes:
    """Return an MQTT 5 PUBLISH on topic ``t``, at QoS 1 where there is a packet id."""
    body = b"\0\1t" + (struct.pack(">H", packet_id) if packet_id else b"") + b"\0" + payload
    size, length = bytearray(), len(body)
    while True:
        size.append(length % 128 | (128 if length >= 128 else 0))
        length //= 128
        if not length:
            return bytes([0x32 if packet_id else 0x30]) + bytes(size) + body


class Peer:
    """The broker's side of a connection: sends publishes, writes down the packet ids that were acknowledged."""

    def __init__(self, *publishes: bytes) -> None:
        self.publishes = publishes
        self.sent = 0
        self.acknowledged: list[int] = []
        self.connections = 0

    def __call__(self, connection: socket.socket, _version: int) -> None:
        self.connections += 1
        connection.sendall(ACCEPT_V5)
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()
        with contextlib.suppress(OSError):
            for packet in self.publishes:
                connection.sendall(packet)
                self.sent += 1
            time.sleep(30)

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                while len(data) >= 4 and data[0] == PUBACK:
                    self.acknowledged.append(int.from_bytes(data[2:4], "big"))
                    data = data[2 + data[1] :]


def handle(inbox: Inbox, count: int) -> list[bytes]:
    """Handle messages until ``count`` were, and return their payloads."""
    done: list[bytes] = []
    end_s = time.monotonic() + 10
    while len(done) < count and time.monotonic() < end_s:
        for item in inbox.batch(0.05, most=count - len(done)):
            if isinstance(item, Message):
                done.append(item.payload)
    return done


def start(url: str, inbox: Inbox) -> MqttTransport:
    transport = MqttTransport(url, "client-1", inbox.put, manual_ack=True, reconnect_min_s=0.01, reconnect_max_s=0.05)
    transport.start()
    return transport


def test_acknowledged_once_handled(broker: Callable[..., ScriptedBroker]) -> None:
    """A message is acknowledged once it was handled."""
    peer, inbox = Peer(*(publish_packet(b"%d" % i, packet_id=i) for i in (1, 2, 3))), Inbox()
    transport = start(broker(peer).url, inbox)
    try:
        until(lambda: transport.bytes_received == 3)
        time.sleep(0.1)
        assert peer.acknowledged == []
        assert handle(inbox, 2) == [b"1", b"2"]
        until(lambda: len(peer.acknowledged) == 2)
        assert handle(inbox, 1) == [b"3"]
        until(lambda: peer.acknowledged == [1, 2, 3])
    finally:
        transport.close()


def test_default_acknowledges_on_arrival(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """By default a message is acknowledged on arrival."""
    peer = Peer(publish_packet(b"x", packet_id=7))
    transport, events = connect(broker(peer).url)
    transport.start()
    until(lambda: peer.acknowledged == [7])
    assert isinstance(events.get(timeout=5), Connected)
    events.get(timeout=5).acknowledge()


@pytest.mark.parametrize("qos", [0, 1])
def test_reading_stops_while_too_much_waits(broker: Callable[..., ScriptedBroker], qos: int) -> None:
    """A flood stays in the sockets' buffers and with its sender, whatever the window that it respects."""
    total = 4 * limits.MAX_UNHANDLED_BYTES // len(CHUNK)
    peer, inbox = Peer(*(publish_packet(CHUNK, packet_id=qos * (i + 1)) for i in range(total))), Inbox()
    transport = start(broker(peer).url, inbox)
    try:
        until(lambda: transport.bytes_received >= 0.9 * limits.MAX_UNHANDLED_BYTES)
        time.sleep(0.3)
        assert transport.bytes_received <= limits.MAX_UNHANDLED_BYTES + limits.MAX_PACKET_BYTES
        assert peer.sent < total
        assert len(handle(inbox, total)) == total
        until(lambda: len(peer.acknowledged) == qos * total)
    finally:
        transport.close()


@pytest.mark.slow
def test_small_messages_have_an_overhead(broker: Callable[..., ScriptedBroker]) -> None:
    """Small messages count with their overhead."""
    total = 3 * limits.MAX_UNHANDLED_BYTES // limits.MESSAGE_OVERHEAD_BYTES
    peer, inbox = Peer(publish_packet(b"x") * total), Inbox()
    transport = start(broker(peer).url, inbox)
    try:
        until(lambda: transport.bytes_received > 0.5 * limits.MAX_UNHANDLED_BYTES / limits.MESSAGE_OVERHEAD_BYTES)
        time.sleep(0.3)
        assert transport.bytes_received < 1.5 * limits.MAX_UNHANDLED_BYTES / limits.MESSAGE_OVERHEAD_BYTES
        assert len(handle(inbox, total)) == total
    finally:
        transport.close()


def test_earlier_connections_message(
    broker: Callable[..., ScriptedBroker],
) -> None:
    """Its packet id may stand for another message by then, and the broker sends it again."""
    connections: list[list[int]] = []

    def script(connection: socket.socket, version: int) -> None:
        peer = Peer(publish_packet(b"%d" % len(connections), packet_id=1))
        connections.append(peer.acknowledged)
        if len(connections) == 1:
            connection.sendall(ACCEPT_V5 + peer.publishes[0])
            time.sleep(0.2)
            connection.shutdown(socket.SHUT_RDWR)
        else:
            peer(connection, version)
            hold(connection)

    inbox = Inbox()
    transport = start(broker(script).url, inbox)
    try:
        until(lambda: transport.bytes_received == 2)
        assert handle(inbox, 1) == [b"0"]
        time.sleep(0.2)
        assert connections[1] == []
        assert handle(inbox, 1) == [b"1"]
        until(lambda: connections[1] == [1])
    finally:
        transport.close()


def test_close_leaves_unhandled_messages(broker: Callable[..., ScriptedBroker]) -> None:
    """The broker's acknowledgements of what we publish are read while the inbox is full."""
    total = 2 * limits.MAX_UNHANDLED_BYTES // len(CHUNK)
    inbox = Inbox()
    transport = start(broker(Peer(*(publish_packet(CHUNK) for _ in range(total)))).url, inbox)
    until(lambda: transport.bytes_received >= 0.9 * limits.MAX_UNHANDLED_BYTES)
    began_s = time.monotonic()
    transport.close()
    assert time.monotonic() - began_s < 5


def test_packet_above_limit_ends_connection(
    broker: Callable[..., ScriptedBroker], caplog: pytest.LogCaptureFixture
) -> None:
    """Only its beginning is read: a broker could otherwise make a device hold 256 MB."""
    peer, inbox = Peer(publish_packet(bytes(64 * limits.MAX_PACKET_BYTES))), Inbox()
    transport = start(broker(peer).url, inbox)
    try:
        until(lambda: peer.connections > 1)
        assert peer.sent == 0
        assert transport.bytes_received == 0
        assert "over the limit of 1048576" in caplog.text
    finally:
        transport.close()


def test_packets_above_limit_are_no_takeover(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """A stranger on a broker without MQTT 5 could otherwise end the whole fleet with one retained message."""
    peer = Peer(publish_packet(bytes(2 * limits.MAX_PACKET_BYTES)))
    transport, events = connect(broker(peer).url)
    transport.start()
    until(lambda: peer.connections > MANY_ENDS + 1)
    seen = [events.get() for _ in range(events.qsize())]
    assert TakenOver() not in seen
    assert Disconnected("the broker sent a packet above the limit") in seen
