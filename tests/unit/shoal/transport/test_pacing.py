"""The pace of a connection: messages are spread over time, and a slow link gets small chunks."""

from __future__ import annotations

from shoal import limits
from shoal.transport import pacing
from shoal.transport.pacing import Pace


def sent_by(pace, sizes, end_s, step_s=0.01):
    """Return the bytes that leave until ``end_s`` when the thread looks every ``step_s``."""
    total, waiting = 0, list(sizes)
    for tick in range(int(end_s / step_s)):
        while waiting and not pace.wait_s(tick * step_s):
            pace.sent(waiting[0], tick * step_s)
            total += waiting.pop(0)
    return total


def test_no_limit_never_waits():
    """Kilobits are thousands of bits."""
    pace = Pace()
    pace.sent(1 << 30, 5.0)
    assert pace.wait_s(5.0) == 0
    assert pace.most_chunk_bytes == limits.MAX_PACKET_BYTES
    assert Pace.of_kbps(64).most_chunk_bytes == 8000
    assert Pace.of_kbps(0).wait_s(0.0) == 0


def test_bytes_a_second_are_kept():
    """The first message leaves at once, and no rate is saved up while nothing is sent."""
    assert 9_000 <= sent_by(Pace(1000), [500] * 100, 10) <= 10_500
    pace = Pace(1000)
    pace.sent(500, 100.0)
    assert pace.wait_s(100.0) == 0.5


# -- Random numbers for jitter --


def test_draws_are_spread_over_the_interval(monkeypatch):
    draws = [pacing.uniform(2.0, 4.0) for _ in range(1000)]
    assert all(2.0 <= draw < 4.0 for draw in draws)
    assert 2.9 < sum(draws) / len(draws) < 3.1
    monkeypatch.setattr(pacing.os, "urandom", lambda count: b"\xff" * count)
    assert all(pacing.uniform() < 1.0 for _ in range(65)), "some are drawn already"
