"""A broker that caps packets at 64 KiB: chunks shrink to its limit, and long transfers arrive."""

from __future__ import annotations

import os
import queue
import subprocess
import time

import pytest

from shoal.errors import BrokerUnreachableError
from shoal.limits import CHUNK_BYTES
from shoal.protocol.chunking import PACKET_ROOM_BYTES, ChunkKind, split
from shoal.protocol.reassembly import Reassembler
from shoal.transport.base import Message
from shoal.transport.local_broker import find_mosquitto, free_port
from shoal.transport.mqtt import MqttTransport
from shoal.transport.retained import RetainedPublisher

PACKET_BYTES = 64 * 1024
PAYLOAD = os.urandom(300_000)
WAIT_S = 20.0
PROBE = b"is anybody there?"

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]


@pytest.fixture
def url(tmp_path):
    """The address of a mosquitto that takes packets of 64 KiB at most."""
    port, file = free_port(), tmp_path / "mosquitto.conf"
    user = "user root\n" if os.geteuid() == 0 else ""
    file.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_packet_size {PACKET_BYTES}\n{user}")
    broker = subprocess.Popen([find_mosquitto(), "-c", file], stderr=subprocess.DEVNULL)
    yield f"mqtt://127.0.0.1:{port}"
    broker.terminate()
    broker.wait(10)


@pytest.fixture
def connect(url):
    """Connect a client under a name; a broker that is still starting is tried again."""
    open_ = []

    def make(name, sink=lambda _: None):
        end_s = time.monotonic() + WAIT_S
        while True:
            transport = MqttTransport(url, name, sink)
            try:
                transport.start(require=True)
            except BrokerUnreachableError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.1)
            else:
                open_.append(transport)
                return transport

    yield make
    for transport in open_:
        transport.close()


def received(inbox, topic_prefix):
    """Return the first whole transfer that arrives."""
    chunks, end_s = Reassembler(), time.monotonic() + WAIT_S
    while True:
        event = inbox.get(timeout=max(0.01, end_s - time.monotonic()))
        if isinstance(event, Message) and event.topic.startswith(topic_prefix) and event.payload != PROBE:
            assert len(event.payload) < PACKET_BYTES
            transfer = chunks.add("peer", event.payload, 0.0)
            if transfer is not None:
                return bytes(transfer.payload)


def subscribed(reader, inbox, topic):
    """Subscribe, and return when the broker hands messages on."""
    reader.subscribe(topic)
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        reader.publish(topic, PROBE)
        try:
            while not isinstance(inbox.get(timeout=0.2), Message):
                pass
        except queue.Empty:
            continue
        return
    raise AssertionError("no subscription")


def test_small_packets_carry_long_transfers(connect):
    """An upload, and a model that is retained for later subscribers."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    reader = connect("reader", inbox.put)
    subscribed(reader, inbox, "up")
    writer = connect("writer")
    assert writer.chunk_bytes == PACKET_BYTES - PACKET_ROOM_BYTES < CHUNK_BYTES
    for chunk in split(PAYLOAD, kind=ChunkKind.UPLOAD, round=1, chunk_bytes=writer.chunk_bytes):
        writer.publish("up", chunk)
    assert received(inbox, "up") == PAYLOAD
    RetainedPublisher(writer).publish("model", PAYLOAD, kind=ChunkKind.MEAN)
    reader.subscribe("model/#")
    assert received(inbox, "model") == PAYLOAD
