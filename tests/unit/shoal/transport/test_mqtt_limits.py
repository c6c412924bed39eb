"""Brokers that take small packets only and do not say so, and brokers without retained messages."""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

import pytest

from shoal.errors import BrokerUnreachableError
from shoal.limits import CHUNK_BYTES
from shoal.transport.base import Connected, Disconnected
from shoal.transport.mqtt import MqttTransport
from shoal.transport.mqtt_connection import LEAST_PACKET_BYTES
from tests.helpers.bad_links import read_packet
from tests.helpers.scripted_broker import ACCEPT_V5, ScriptedBroker

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
    with pytest.raises(BrokerUnreachableError, match="keeps no retained messages") as caught:
        transport.start(require=True)
    assert "retain_available true" in caught.value.hint
