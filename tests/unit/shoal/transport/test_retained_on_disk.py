"""Bytes that wait on the disk to be sent again."""

import pytest

from shoal.transport import retained
from shoal.transport.retained import out_of_memory

DATA = bytes(range(100))


@pytest.mark.parametrize("full", [False, True])
def test_many_bytes_are_on_the_disk(tmp_path, monkeypatch, full):
    """On a full disk they stay in memory."""
    monkeypatch.setattr(retained, "STORED_FROM_BYTES", len(DATA))
    assert out_of_memory(DATA[1:], tmp_path) == DATA[1:]
    found = out_of_memory(DATA, tmp_path / "missing" if full else tmp_path)
    assert (found is DATA) == full
    assert (len(found), bytes(found), bytes(found[90:110][2:5])) == (100, DATA, DATA[92:95])
