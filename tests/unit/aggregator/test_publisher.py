"""What the aggregator publishes fits the packets that its broker takes."""

from types import SimpleNamespace

import pytest

from aggregator.publisher import Publisher
from crypto.seal.envelope import GroupKey
from crypto.seal.identity import Identity
from shoal import limits
from shoal.protocol.chunking import MIN_CHUNK_BYTES, parse
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
    publisher.ask_again(Identity.generate(NAME).member, run_plan(), 1, bytes(16), tuple(range(MAX_MISSING_LISTED)))
    (packet,) = sent
    assert len(parse(packet)[1]) <= chunk_bytes
