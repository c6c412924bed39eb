"""For any bytes, framing returns a value or raises WireError, and never returns a wrong payload."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import WireError
from shoal.protocol.chunking import HEADER, HEADER_BYTES, MAGIC, MIN_CHUNK_BYTES, ChunkKind, parse, split
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.topics import ParsedTopic, Topics, matches
from shoal.protocol.topics import parse as parse_topic

small_ints = st.integers(0, 4) | st.sampled_from([1023, 1024, 2048, 3000, 2**31, 2**32 - 1])
long_ints = small_ints | st.sampled_from([2**30, 2**30 + 1, 2**63, 2**64 - 1])


@st.composite
def near_chunks(draw: st.DrawFn) -> bytes:
    """Bytes that look like a chunk: a header of plausible and extreme numbers, then any payload."""
    head = HEADER.pack(
        draw(st.sampled_from([MAGIC, MAGIC, MAGIC, b"SHL2"])),
        draw(st.sampled_from([1, 1, 1, 0, 255])),
        draw(st.integers(0, 9)),
        draw(st.sampled_from([0, 0, 0, 1])),
        draw(small_ints),
        draw(small_ints),
        draw(small_ints),
        draw(long_ints),
        draw(long_ints),
        draw(st.binary(min_size=16, max_size=16)),
    )
    return head + bytes(draw(st.sampled_from([0, 1, 512, 1023, 1024, 1025, 2048])))


@given(st.one_of(st.binary(max_size=200), near_chunks()))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        header, body = parse(data)
    except WireError:
        return
    assert header.index < header.total
    assert header.offset + len(body) <= header.size
    assert bytes(body) == data[HEADER_BYTES:]


@given(st.lists(st.one_of(st.binary(max_size=100), near_chunks()), max_size=20))
def test_any_sequence_stays_within_bounds(stream: list[bytes]) -> None:
    """The reassembler survives any sequence within its bounds."""
    one = Reassembler(max_transfer_bytes=1 << 20, whole_transfers=1, max_per_source=2)
    for number, data in enumerate(stream):
        try:
            one.add(f"s{number % 3}", data, float(number))
        except WireError:
            pass
        assert one.held_bytes <= sum(len(d) + 2048 for d in stream[: number + 1])
        assert one.held_bytes <= 3 * one.budget_bytes(1 << 20)
        assert len(one) <= 6
    one.stalled(100.0)
    one.expire(1000.0)
    assert len(one) == one.held_bytes == 0


@given(
    sizes=st.lists(st.integers(1, 5 * MIN_CHUNK_BYTES), min_size=2, max_size=4),
    junk=st.lists(st.tuples(st.integers(0, 3), near_chunks()), max_size=20),
    random=st.randoms(use_true_random=False),
)
def test_interleaved_sources_keep_payloads(sizes, junk, random) -> None:  # type: ignore[no-untyped-def]
    """Chunks of several sources in any order, among any chunks of a stranger: all payloads, within the budgets."""
    allowed = {ChunkKind.UPLOAD: max(sizes)}
    payloads = {f"s{i}": bytes([i]) * size for i, size in enumerate(sizes)}
    stream = [
        (source, chunk)
        for source, payload in payloads.items()
        for chunk in split(payload, kind=ChunkKind.UPLOAD, round=1, chunk_bytes=MIN_CHUNK_BYTES)
    ]
    stream += [(f"stranger-{i}", chunk) for i, chunk in junk]
    random.shuffle(stream)
    one = Reassembler(whole_transfers=1)
    found = {}
    for source, chunk in stream:
        try:
            transfer = one.add(source, chunk, 0.0, allowed)
        except WireError:
            continue
        if transfer is not None and source in payloads:
            found[source] = bytes(transfer.payload)
        assert one.held_bytes <= (len(sizes) + 4) * one.budget_bytes(max(sizes))
    assert found == payloads
    for source in (*payloads, *(f"stranger-{i}" for i in range(4))):
        one.drop(source)
    assert one.held_bytes == 0


@given(
    payload=st.binary(min_size=1, max_size=6 * MIN_CHUNK_BYTES),
    chunk_bytes=st.integers(MIN_CHUNK_BYTES, 2 * MIN_CHUNK_BYTES),
    random=st.randoms(use_true_random=False),
)
def test_any_order_gives_the_payload(payload: bytes, chunk_bytes: int, random) -> None:  # type: ignore[no-untyped-def]
    """Each chunk arrives at least once, some twice, in any order: the result is the payload, and only it."""
    chunks = split(payload, kind=ChunkKind.MEAN, round=1, chunk_bytes=chunk_bytes)
    stream = chunks + random.choices(chunks, k=random.randrange(4))
    random.shuffle(stream)
    one = Reassembler()
    found = [transfer for transfer in (one.add("s", chunk, 0.0) for chunk in stream) if transfer is not None]
    assert found
    assert all(isinstance(transfer, Transfer) and transfer.payload == payload for transfer in found)


@settings(max_examples=200)
@given(
    payload=st.binary(min_size=MIN_CHUNK_BYTES + 1, max_size=4 * MIN_CHUNK_BYTES),
    where=st.integers(0, 1 << 20),
    bit=st.integers(0, 7),
)
def test_flipped_bit_gives_no_other_payload(payload: bytes, where: int, bit: int) -> None:
    """Damage in any byte of any chunk is refused, leaves the transfer open, or hits the round number alone."""
    chunks = split(payload, kind=ChunkKind.UPLOAD, round=1, chunk_bytes=MIN_CHUNK_BYTES)
    victim = where % len(chunks)
    damaged = bytearray(chunks[victim])
    damaged[where // len(chunks) % len(damaged)] ^= 1 << bit
    chunks[victim] = bytes(damaged)
    one = Reassembler()
    for chunk in chunks:
        try:
            transfer = one.add("s", chunk, 0.0)
        except WireError:
            continue
        assert transfer is None


@given(
    st.text(max_size=40) | st.from_regex(r"shoal/v1/[a-z]{1,3}/[sde]/[a-z]{1,6}(/[a-z0-9]{1,3}){0,2}", fullmatch=True)
)
def test_any_text_is_our_topic_or_refused(text: str) -> None:
    """Any text is a topic of ours or refused."""
    try:
        parsed = parse_topic(text)
    except WireError:
        return
    assert isinstance(parsed, ParsedTopic)
    topics = Topics(parsed.fleet)
    assert text.startswith(topics.root + "/")
    assert matches(topics.root + "/#", text)
