"""The store at which workers meet: addresses of one generation, none replaced, and no more than a group has."""

import pytest

from aggregator.shards import sums
from shoal.errors import UntrustedError, WireError
from shoal.protocol.jobs import MAX_ADDRESS_BYTES, GroupAddress


def address(key="0/1", generation="g", value=b"a"):
    return GroupAddress(generation, key, value)


def test_meeting_takes_its_own_generation(monkeypatch):
    """A meeting takes addresses of its own generation and replaces none."""
    monkeypatch.setattr(sums, "JOIN_S", 0.01)
    sent = []
    store = sums.MeetingStore("g", 2, sent.append)
    store.set("0/0", b"mine")
    assert sent == [address("0/0", value=b"mine")]
    store.take([address(), address(value=b"another"), address("0/0"), address("0/9", generation="before")])
    assert (store.get("0/1"), store.get("0/0")) == (b"a", b"mine")
    with pytest.raises(RuntimeError, match="no address"):
        store.get("0/9")


def test_a_member_can_not_fill_a_meeting():
    store = sums.MeetingStore("g", 2, lambda _: None)
    with pytest.raises(UntrustedError, match="more than 8 addresses"):
        store.take([address(f"0/{i}") for i in range(1000)])
    with pytest.raises(WireError, match="an address of"):
        address(value=bytes(MAX_ADDRESS_BYTES + 1))
