"""What is published at QoS 0 over MQTT: sent once, and counted as long as it is on its way."""

import queue
import socket
import threading
import time
from collections.abc import Callable

from shoal.transport.base import Connected
from shoal.transport.mqtt import MqttTransport
from tests.helpers.scripted_broker import ACCEPT_V5, ScriptedBroker, hold
from tests.helpers.waiting import until


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
