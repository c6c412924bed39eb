"""A device's incarnation: it grows with every start even if the clock is wrong, and a damaged file does not prevent a start."""

import time
from types import SimpleNamespace

import pytest

from edge_client.daemon import BIRTH_FILE, next_birth


@pytest.fixture
def device(tmp_path):
    return SimpleNamespace(directory=tmp_path)


def test_births_grow(device):
    first = next_birth(device)
    assert next_birth(device) > first


def test_births_grow_when_the_clock_goes_back(device, monkeypatch):
    first = next_birth(device)
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    assert next_birth(device) == first + 1
    assert next_birth(device) == first + 2


@pytest.mark.parametrize("junk", [b"", b"abc", b"\xff\xfe", b"-5", b"1e9", b"9" * 40, b"9" * 5000, b"12\n13"])
def test_a_damaged_number_is_replaced_by_the_clocks(device, caplog, junk):
    path = device.directory / BIRTH_FILE
    path.write_bytes(junk)
    before = time.time_ns()
    birth = next_birth(device)
    assert before <= birth < 2**64 - 1
    assert "is damaged" in caplog.text
    assert int(path.read_text()) == birth
