"""Training, validation and test shares of a device, and the figures of a population."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import DataError, UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.shares import CFL_SHARES, NINETY_TEN, Shares, by_shard, cut, population_of, statistics

X, Y = np.arange(20, dtype=np.float32)[:, None], np.arange(20) % 3


def rows(shard):
    """Return which samples a shard holds."""
    return shard.x[:, 0].astype(int).tolist()


def sizes(count, shares):
    return tuple(map(len, cut(X, Y, np.arange(count), shares)))


@pytest.mark.parametrize(
    ("names", "labels"), [(None, [[1, 0, 0], [1], [2]]), ([5, 7, 6], [[7, 5, 5], [7], [6]])], ids=["labels", "renamed"]
)
def test_rows_are_cut_in_their_order(names, labels):
    """Rows are cut in their order with their labels, which may be renamed."""
    parts = cut(X, Y, np.array([7, 3, 9, 1, 5]), CFL_SHARES, None if names is None else np.array(names))
    assert [rows(p) for p in parts] == [[7, 3, 9], [1], [5]]
    assert [p.y.tolist() for p in parts] == labels
    assert Y[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (10, CFL_SHARES, (6, 2, 2)),  # 0.6 + 0.2 of 10 is 7.999999999999999
        (20, CFL_SHARES, (12, 4, 4)),
        (3, CFL_SHARES, (1, 1, 1)),
        (2, CFL_SHARES, (1, 0, 1)),
        (1, CFL_SHARES, (1, 0, 0)),
        (0, CFL_SHARES, (0, 0, 0)),
        (19, NINETY_TEN, (17, 0, 2)),
        # Without a test share nothing is left over for it, although these add up to 1 only nearly.
        (20, Shares(0.3333333333, 0.6666666666, 0.0), (6, 14, 0)),
        (9, Shares(0.01, 0.0, 0.99), (1, 0, 8)),
    ],
)
def test_shares_are_rounded_down(count, shares, expected):
    """Shares are rounded down and training has a sample."""
    assert sizes(count, shares) == expected


@pytest.mark.parametrize("count", range(21))
def test_a_cut_loses_no_sample(count):
    parts = cut(X, Y, np.arange(count), CFL_SHARES)
    assert [row for p in parts for row in rows(p)] == list(range(count))


@pytest.mark.parametrize(
    "shares", [Shares(0.5, 0.2, 0.2), Shares(0.0, 0.5, 0.5), Shares(1.2, -0.2, 0.0), Shares(0.6, 0.3, 0.2)]
)
def test_unfit_shares_are_refused(shares):
    """Shares that do not add up are refused."""
    with pytest.raises(UsageError) as caught:
        sizes(10, shares)
    assert str(caught.value) == f"shares {tuple(shares)} must add up to 1, with some to train on"


def test_shard_is_shuffled_by_the_seed():
    """A device of each shard holds its samples shuffled by the seed."""
    shards = [Shard(X[:10], Y[:10]), Shard(X[10:], Y[10:])]
    one, again, other = (by_shard(shards, seed=s, groups=[4, 5]) for s in (0, 0, 1))
    for i in range(2):
        assert sorted(rows(one.train[i]) + rows(one.test[i])) == list(range(10 * i, 10 * i + 10))
        assert rows(one.train[i]) == rows(again.train[i]) != rows(other.train[i])
        assert rows(one.train[i]) != sorted(rows(one.train[i]))
    assert (len(one.train[0]), len(one.validation[0]), len(one.test[0])) == (9, 0, 1)
    assert one.groups == (4, 5)
    assert by_shard(shards, seed=0).groups is None


def test_a_population_needs_a_device():
    with pytest.raises(DataError, match="at least one training sample"):
        population_of([], None)


def test_statistics_are_the_papers():
    """Statistics are those that a paper prints."""

    def shards(*counts):
        return tuple(Shard(X[:n], Y[:n]) for n in counts)

    data = Population(
        shards(1, 2, 9), shards(1, 0, 0), shards(0, 1, 1), (0, 0, 5), probes=shards(3, 4), probe_groups=(0, 5)
    )
    assert statistics(data) == {
        "devices": 3,
        "samples": 22,
        "train": 12,
        "validation": 1,
        "test": 2,
        "probes": 2,
        "probe_samples": 7,
        "groups": 2,
        "samples_a_device": {"min": 2, "median": 3.0, "mean": 5.0, "max": 10},
    }
    assert statistics(Population(shards(2)))["groups"] is None
