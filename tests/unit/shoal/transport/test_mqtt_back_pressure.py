"""Acknowledgement of received messages after they were handled, and the bounds on those that wait and that are on their way."""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from shoal import limits
from shoal.errors import BrokerUnreachableError
from shoal.limits import CHUNK_BYTES
from shoal.transport.base import Connected, Disconnected, Message, TakenOver
from shoal.transport.inbox import Inbox
from shoal.transport.mqtt import MANY_ENDS, MqttTransport
from shoal.transport.mqtt_connection import LEAST_PACKET_BYTES
from tests.helpers.bad_links import read_packet
from tests.helpers.refusals import refused
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


# -- What is published at QoS 0 over MQTT: sent once, and counted as long as it is on its way --


def test_at_qos_0_nothing_is_waited_for(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """Neither the window nor the queue counts what the broker's machine has received."""
    received = bytearray()
    everything = threading.Event()

    def script(connection: socket.socket, version: int) -> None:
        connection.sendall(ACCEPT_V5)
        while received.count(publish) < 100:
            received.extend(connection.recv(65536))
        everything.set()
        hold(connection)

    publish = bytes([0x30, 8, 0, 1]) + b"t" + bytes([0]) + b"once"
    transport, events = connect(broker(script).url, max_queued_bytes=400)
    transport.start()
    assert isinstance(events.get(timeout=5), Connected)
    for _ in range(100):
        transport.publish("t", b"once", qos=0)
    assert everything.wait(5)
    until(lambda: transport.pending() == 0)
    transport.publish("t", bytes(400))


def test_qos_0_counts_until_it_is_taken(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """What has left the program may lie in the system's buffer for long: a slow link is not idle."""
    read = threading.Event()

    def script(connection: socket.socket, version: int) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(ACCEPT_V5)
        assert read.wait(5)
        hold(connection)

    transport, events = connect(broker(script).url)
    transport.start()
    assert isinstance(events.get(timeout=5), Connected)
    transport.publish("t", bytes(150_000), qos=0)
    until(lambda: not transport._link._unwritten)
    time.sleep(0.1)
    assert transport.pending() == 1
    read.set()
    until(lambda: transport.pending() == 0)


def test_qos_0_not_taken_is_given_up(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """It is not sent again, its bytes are free for others, and what was to be acknowledged still comes."""
    full, received = threading.Event(), bytearray()

    def script(connection: socket.socket, version: int) -> None:
        if len(one.versions) == 1:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(ACCEPT_V5)
            assert full.wait(5)
            return
        connection.sendall(ACCEPT_V5)
        while b"assured" not in received:
            received.extend(connection.recv(65536))
        received.extend(b"end")
        hold(connection)

    one = broker(script)
    transport, events = connect(one.url, max_queued_bytes=16 << 20)
    transport.start()
    assert isinstance(events.get(timeout=5), Connected)
    for _ in range(31):
        transport.publish("t", b"once" * (1 << 17), qos=0)
    transport.publish("t", b"assured")
    time.sleep(0.2)
    assert transport.pending() > 1
    full.set()
    until(lambda: received.endswith(b"end"))
    assert b"once" not in received
    assert transport.pending() == 1
    for _ in range(31):  # 15.5 MB of the 16 that may wait
        transport.publish("t", bytes(1 << 19))


# -- Brokers that take small packets only and do not say so, and brokers without retained messages --


WAIT_S = 20.0
TOO_LARGE, HANG_UP, SAY_SO = "packet too large", "hang up", "disconnect with a code"


class SmallBroker:
    """Acknowledges publishes at QoS 1 of at most so many bytes, and refuses others in one of three ways."""

    def __init__(self, most: int, how: str) -> None:
        self.most, self.how = most, how
        self.taken: list[int] = []
        self.refused: list[int] = []
        self.fits = threading.Event()

    def __call__(self, connection: socket.socket, _version: int) -> None:
        connection.sendall(ACCEPT_V5)
        with contextlib.suppress(OSError, EOFError):
            while True:
                head, packet = read_packet(connection)
                if head[0] >> 4 != 3:
                    continue
                packet_id = packet[3:5]  # the topic is one letter
                if len(packet) <= self.most:
                    self.taken.append(len(packet))
                    if head[0] & 2:
                        connection.sendall(bytes([0x40, 2]) + packet_id)
                    continue
                self.refused.append(len(packet))
                if self.how == TOO_LARGE:
                    connection.sendall(bytes([0x40, 3]) + packet_id + b"\x95")
                    continue
                if self.how == SAY_SO:
                    connection.sendall(bytes([0xE0, 1, 0x95]))
                return


@pytest.mark.parametrize("how", [TOO_LARGE, HANG_UP, SAY_SO])
@pytest.mark.parametrize("most", [100_000, 65_536, 9_000])
def test_chunks_shrink_until_they_are_taken(
    how: str,
    most: int,
    broker: Callable[..., ScriptedBroker],
    connect: Callable[..., tuple[MqttTransport, queue.Queue]],
) -> None:
    """Each time the connection comes back, the program divides again; small messages are not lost."""
    script = SmallBroker(most, how)
    transport, events = connect(broker(script).url)
    transport.start()
    for _ in range(30):
        if isinstance(events.get(timeout=WAIT_S), Connected):
            size = transport.chunk_bytes
            transport.publish("t", bytes(size))
            transport.publish("t", b"small")
            if size < most - 100:
                break
    refused = len(script.refused)
    while transport.pending():
        with contextlib.suppress(queue.Empty):
            events.get(timeout=0.05)
    # Not by Disconnected: those of the sizes before may be read late.
    assert script.refused[refused:] == [], "the broker takes the last size"
    assert most / 2 - 2048 <= size < most
    assert len(b"\0\1t\0\1\0small") in script.taken
    assert max(script.taken) >= size


def test_single_drop_shrinks_nothing(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """Nor one that drops for ever, once the broker has taken such a packet."""
    script = SmallBroker(CHUNK_BYTES // 2, HANG_UP)
    one = broker(script)
    transport, events = connect(one.url)
    transport.start()
    assert isinstance(events.get(timeout=WAIT_S), Connected)
    transport.publish("t", bytes(CHUNK_BYTES))
    assert isinstance(events.get(timeout=WAIT_S), Disconnected)
    script.most = 2 * CHUNK_BYTES
    assert isinstance(events.get(timeout=WAIT_S), Connected)
    while transport.pending():
        threading.Event().wait(0.01)
    script.most = CHUNK_BYTES // 2
    for _ in range(4):
        transport.publish("t", bytes(CHUNK_BYTES))
        assert isinstance(events.get(timeout=WAIT_S), Disconnected)
        assert isinstance(events.get(timeout=WAIT_S), Connected)
    assert transport.chunk_bytes == CHUNK_BYTES


def test_at_qos_0_refused_size_is_found_too(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """Nobody acknowledges such a publish: after a lost connection the next is sent at QoS 1."""
    script = SmallBroker(65_536, HANG_UP)
    transport, events = connect(broker(script).url)
    transport.start()
    for _ in range(30):
        if isinstance(events.get(timeout=WAIT_S), Connected):
            if transport.chunk_bytes < script.most:
                break
            transport.publish("t", bytes(transport.chunk_bytes), qos=0)
    assert LEAST_PACKET_BYTES < transport.chunk_bytes < script.most


@pytest.mark.parametrize(
    "answer",
    [bytes([0x20, 5, 0, 0, 2, 0x25, 0]), bytes([0x20, 3, 0, 0x9A, 0]), ACCEPT_V5 + bytes([0xE0, 1, 0x9A])],
    ids=["property", "refused", "disconnect"],
)
def test_missing_retained_messages_are_named(
    answer: bytes, broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """A broker without retained messages is named."""
    one = broker(lambda connection, _version: connection.sendall(answer))
    transport, events = connect(one.url)
    if answer.startswith(ACCEPT_V5):
        transport.start()
        assert isinstance(events.get(timeout=WAIT_S), Connected)
        ended = events.get(timeout=WAIT_S)
        assert isinstance(ended, Disconnected)
        assert "keeps no retained messages" in ended.reason
        return
    with refused(BrokerUnreachableError, "keeps no retained messages", hint="retain_available true"):
        transport.start(require=True)
