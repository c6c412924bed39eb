"""What the aggregator publishes fits the packets that its broker takes."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from aggregator import publisher as module
from aggregator.publisher import Publisher
from crypto.seal import envelope
from crypto.seal.envelope import GroupKey
from crypto.seal.identity import Identity
from shoal import limits
from shoal.protocol import channels
from shoal.protocol.chunking import HEADER_BYTES, MIN_CHUNK_BYTES, parse, transfer_id
from shoal.protocol.messages import Action
from shoal.protocol.reassembly import MAX_MISSING_LISTED
from tests.helpers.plans import run_plan

NAME = "d" * limits.MAX_NAME_CHARS


@pytest.mark.parametrize("chunk_bytes", [MIN_CHUNK_BYTES, 2048, limits.CHUNK_BYTES])
def test_long_question_fits_one_packet(tmp_path, chunk_bytes):
    """A question for many chunks is cut to one packet."""
    sent = []
    transport = SimpleNamespace(chunk_bytes=chunk_bytes, publish=lambda _topic, payload: sent.append(payload))
    group = GroupKey("demo", "broadcast", bytes(32))
    publisher = Publisher(Identity.generate("aggregator"), group, transport, tmp_path / "retained.json")
    missing, member = tuple(range(MAX_MISSING_LISTED)), Identity.generate(NAME).member
    publisher.answer(member, run_plan(), 1, bytes(16), Action.NACK, "chunks missing", missing)
    (packet,) = sent
    assert len(parse(packet)[1]) <= chunk_bytes


@pytest.mark.parametrize("folder", ["", "missing"], ids=["disk", "no room"])
def test_long_message_is_sealed_on_disk(tmp_path, monkeypatch, folder):
    """It is what a short one would be, in more than one block; without room on the disk it is sealed in memory."""
    monkeypatch.setattr(module, "STORED_FROM_BYTES", 1)
    monkeypatch.setattr(envelope, "BLOCK_BYTES", 7)
    sent = []
    transport = SimpleNamespace(
        chunk_bytes=2048,
        publish=lambda _topic, payload, **_kind: sent.append(bytes(payload)[HEADER_BYTES:]),
        together=nullcontext,
    )
    server, group = Identity.generate("aggregator"), GroupKey("demo", "broadcast", bytes(32))
    publisher = Publisher(server, group, transport, tmp_path / folder / "retained.json")
    transfer = publisher._publish_group(channels.RUN, [b"a" * 5000, memoryview(b"b" * 100)])
    payload = b"".join(sent)
    head, at = envelope.read_head(payload)
    assert transfer == transfer_id(payload)
    assert envelope.open_from_group(group, payload, head, at, server.member.sign_key) == b"a" * 5000 + b"b" * 100
