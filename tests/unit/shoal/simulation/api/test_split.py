"""`shoal.split`: nothing lost, nothing twice, as skewed as asked."""

import numpy as np
import pytest

from shoal.errors import DataError, UsageError
from shoal.simulation.api.split import split
from shoal.util.extensions import SPLITS_GROUP
from tests.helpers.extensions import install

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
def test_senseless_splits_are_refused(arguments, error, text):
    """Splits that make no sense are refused."""
    arguments = {"x": X, "y": Y, "kind": "iid", "devices": 6, **arguments}
    with pytest.raises(error, match=text):
        split(**arguments)


DEALERS = """
import numpy as np

def pairs(y, devices, value, rng):
    return np.array_split(np.arange(int(value or len(y))), devices)

def double(y, devices, value, rng):
    return [np.arange(10)] * devices

def few(y, devices, value, rng):
    return [np.arange(i, i + 1) for i in range(devices)]

def short(y, devices, value, rng):
    return [np.arange(50)]

def words(y, devices, value, rng):
    return ["a"] * devices
"""


def test_a_packages_split_deals_the_samples(tmp_path, monkeypatch):
    names = ("pairs", "double", "few", "short", "words")
    install(tmp_path, monkeypatch, SPLITS_GROUP, {name: name for name in names}, DEALERS)
    x = np.arange(100, dtype=np.float32).reshape(50, 2)
    y = np.arange(50) % 2
    partitions = split(x, y, "pairs:40", devices=4)
    assert sum(len(labels) for p in partitions for _, labels in p.values()) == 40
    assert len(split(x, y, "pairs", devices=5)) == 5
    for kind, message in (
        ("double", "dealt a sample twice"),
        ("few", "fewer than 5 samples"),
        ("short", "gave 1 lists of places for 4 devices"),
        ("words", "gave no lists of places"),
        ("pairs:51", "or one that is not there"),
    ):
        with pytest.raises(DataError, match=message):
            split(x, y, kind, devices=4)
    with pytest.raises(UsageError, match="no split 'pears'") as caught:
        split(x, y, "pears")
    assert "shards:N (shards:2), double, few, pairs" in caught.value.hint
