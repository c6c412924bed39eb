"""The reminder timer: it expires at a random time, and not while a link is still busy."""

import pytest

from edge_client.protocol.patience import RetryTimer
from shoal import limits


class Link:
    """A transport with unacknowledged publishes."""

    waiting = 0

    def pending(self):
        return self.waiting


@pytest.mark.parametrize(("drawn", "due"), [(0.0, 5.0), (0.5, 7.5), (0.999, 9.995)])
def test_it_runs_out_once_between_half_and_all_of_the_time(drawn, due):
    patience = RetryTimer(Link(), lambda: drawn)
    patience.set(10.0, 100.0)
    assert not patience.ran_out(100.0 + due - 0.001)
    assert patience.ran_out(100.0 + due)
    assert not patience.ran_out(1e9)


def test_a_busy_link_puts_it_off():
    link = Link()
    patience = RetryTimer(link, lambda: 0.5)
    patience.set(10.0, 0.0)
    link.waiting = 3
    assert not patience.ran_out(8.0)
    link.waiting = 0
    assert not patience.ran_out(8.0 + 0.75 * limits.REMIND_BASE_S - 0.01)
    assert patience.ran_out(8.0 + 0.75 * limits.REMIND_BASE_S)


def test_it_can_be_cleared():
    patience = RetryTimer(Link(), lambda: 0.5)
    patience.set(10.0, 0.0)
    patience.clear()
    assert not patience.ran_out(1e9)
