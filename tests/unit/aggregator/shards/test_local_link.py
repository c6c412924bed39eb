"""Workers of one process: a missing one makes the round wait, and is named."""

import pytest

from aggregator.shards.calculation import ShardsUnavailableError
from aggregator.shards.worker import LocalLink


def test_a_missing_worker_is_named():
    link = LocalLink(lambda: [None, None])
    with pytest.raises(ShardsUnavailableError, match="worker 0, worker 1 not running") as caught:
        next(link.sums([]))
    assert caught.value.names == ("worker 0", "worker 1")
    with pytest.raises(ShardsUnavailableError):
        link.answers([])
