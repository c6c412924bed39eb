"""`shoal.split`: nothing lost, nothing twice, as skewed as asked."""

import numpy as np
import pytest

from shoal.errors import DataError, UsageError
from shoal.experiments.data.partitions import split

X = np.arange(600, dtype=np.float32).reshape(300, 2, 1)
Y = np.arange(300) % 5


def labels_of(partition):
    return np.concatenate([y for _, y in partition.values()])


@pytest.mark.parametrize("kind", ["iid", "dirichlet:1", "shards:2"])
def test_every_sample_is_dealt_once(kind):
    """With its own label, in the shape that it had; 60/20/20; the same for the same seed."""
    found = split(X, Y, kind, devices=6, seed=1)
    pairs = [(float(x[0, 0]), int(y)) for p in found for xs, ys in p.values() for x, y in zip(xs, ys, strict=True)]
    assert sorted(pairs) == [(2.0 * i, i % 5) for i in range(300)]
    for partition in found:
        sizes = [len(y) for _, y in partition.values()]
        assert list(partition) == ["train", "validation", "test"]
        assert sizes[0] == pytest.approx(0.6 * sum(sizes), abs=1)
        assert min(sizes) >= 1
    again, other = split(X, Y, kind, devices=6, seed=1), split(X, Y, kind, devices=6, seed=2)
    np.testing.assert_array_equal(found[0]["train"][0], again[0]["train"][0])
    assert not np.array_equal(found[0]["train"][0], other[0]["train"][0])


def test_kinds_differ_in_skew():
    """Shards leave a device few labels, a small alpha uneven ones."""

    def largest(kind):
        return np.mean([np.bincount(labels_of(p)).max() / len(labels_of(p)) for p in split(X, Y, kind, devices=6)])

    assert all(len(np.unique(labels_of(p))) <= 2 for p in split(X, Y, "shards:1", devices=5))
    assert largest("iid") < largest("dirichlet:0.5")


@pytest.mark.parametrize("kind", ["iid", "shards:1"])
def test_numbers_can_be_dealt(kind):
    assert sum(len(labels_of(p)) for p in split(X, Y / 7, kind, devices=6)) == 300


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"kind": "random"}, UsageError, "no split 'random'"),
        ({"kind": "iid:3"}, UsageError, "no split 'iid:3'"),
        ({"kind": "dirichlet"}, UsageError, "no split 'dirichlet'"),
        ({"kind": "dirichlet:x"}, UsageError, "ALPHA of a split"),
        ({"kind": "dirichlet:nan"}, UsageError, "ALPHA of a split"),
        ({"kind": "shards:0.5"}, UsageError, "N of a split"),
        ({"kind": "shards:7", "devices": 60}, UsageError, "fewer than 5 samples"),
        ({"devices": 61}, UsageError, "can't give each of 61 devices"),
        ({"devices": 0}, UsageError, "can't give each of 0 devices"),
        ({"y": Y[1:]}, DataError, "one entry a sample"),
        ({"y": Y / 7, "kind": "dirichlet:1"}, DataError, "deals classes"),
        ({"y": np.stack([Y, Y], 1), "kind": "shards:1"}, DataError, "sorts by y"),
    ],
)
def test_splits_that_make_no_sense_are_refused(arguments, error, text):
    arguments = {"x": X, "y": Y, "kind": "iid", "devices": 6, **arguments}
    with pytest.raises(error, match=text):
        split(**arguments)
