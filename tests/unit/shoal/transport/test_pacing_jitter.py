"""Random numbers for jitter."""

from shoal.transport import pacing


def test_draws_are_spread_over_the_interval(monkeypatch):
    draws = [pacing.uniform(2.0, 4.0) for _ in range(1000)]
    assert all(2.0 <= draw < 4.0 for draw in draws)
    assert 2.9 < sum(draws) / len(draws) < 3.1
    monkeypatch.setattr(pacing.os, "urandom", lambda count: b"\xff" * count)
    assert all(pacing.uniform() < 1.0 for _ in range(65)), "some are drawn already"
