"""A broker that caps packets at 64 KiB: chunks shrink to its limit, and long transfers arrive."""

from __future__ import annotations

import os

import pytest

from shoal.limits import CHUNK_BYTES
from shoal.protocol.chunking import PACKET_ROOM_BYTES, ChunkKind, split
from shoal.protocol.reassembly import Reassembler
from shoal.transport.local_broker import find_mosquitto, free_port
from shoal.transport.retained import RetainedPublisher
from tests.helpers.mqtt_clients import settle
from tests.helpers.places import mosquitto

PACKET_BYTES = 64 * 1024
PAYLOAD = os.urandom(300_000)

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]


def received(reader):
    """Return the first whole transfer that arrives."""
    chunks, transfer = Reassembler(), None
    while transfer is None:
        payload = reader.message().payload
        assert len(payload) < PACKET_BYTES
        transfer = chunks.add("peer", payload, 0.0)
    return bytes(transfer.payload)


def test_small_packets_carry_long_transfers(tmp_path, client):
    """An upload, and a model that is retained for later subscribers."""
    port = free_port()
    url, limit = f"mqtt://127.0.0.1:{port}", f"max_packet_size {PACKET_BYTES}"
    with mosquitto(tmp_path, port, f"listener {port} 127.0.0.1", "allow_anonymous true", limit):
        reader, writer = client(url, "reader", "up"), client(url, "writer").transport
        settle(reader, "up")
        assert writer.chunk_bytes == PACKET_BYTES - PACKET_ROOM_BYTES < CHUNK_BYTES
        for chunk in split(PAYLOAD, kind=ChunkKind.UPLOAD, round=1, chunk_bytes=writer.chunk_bytes):
            writer.publish("up", chunk)
        assert received(reader) == PAYLOAD
        RetainedPublisher(writer).publish("model", PAYLOAD, kind=ChunkKind.MEAN)
        reader.transport.subscribe("model/#")
        assert received(reader) == PAYLOAD
