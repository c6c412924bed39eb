"""Persistent collections against plain ones, through random changes of the newest and of earlier versions."""

import random

import pytest

from aggregator.persistent import PersistentList, PersistentMap, PersistentSet


@pytest.mark.parametrize("seed", range(5))
def test_every_version_of_a_map_stays(seed):
    """Every version of a map stays as it was."""
    draw = random.Random(seed)
    versions = [(PersistentMap({"k1": 0}), {"k1": 0})]
    for i in range(600):
        found, plain = versions[-1] if draw.random() < 0.9 else draw.choice(versions)
        key = f"k{draw.randrange(12)}"
        if draw.random() < 0.5:
            versions.append((found.adding(key, i), {**plain, key: i}))
        else:
            versions.append((found.removing(key), {k: v for k, v in plain.items() if k != key}))
    for found, plain in versions:
        assert (found, len(found), set(found)) == (plain, len(plain), set(plain))
        assert all(found.get(f"k{i}") == plain.get(f"k{i}") for i in range(12))
        assert all((f"k{i}" in found) == (f"k{i}" in plain) for i in range(12))


def test_a_set_is_a_set():
    first = PersistentSet("ab")
    second = first.adding("c").removing("a")
    assert (first, second) == ({"a", "b"}, {"b", "c"})
    assert second - first == {"c"}
    assert {"a", "b"} - second == {"a"}
    assert first <= {"a", "b", "z"}
    assert first.adding("a") is first
    assert first.removing("z") is first


def test_list_grows_from_any_of_its_versions():
    first = PersistentList("a")
    second = first.appending("b")
    assert (first, second, first.appending("c")) == (("a",), ("a", "b"), ("a", "c"))
    assert (second[0], second[-1], second[:1]) == ("a", "b", ("a",))
    assert not PersistentList()
    with pytest.raises(IndexError):
        second[2]


def test_many_changes_take_little_memory():
    """Many changes of few entries take little memory."""
    found = PersistentSet("abc")
    for _ in range(10_000):
        found = found.removing("a").adding("a")
    assert found == {"a", "b", "c"}
    assert sum(len(changes) for changes in found._map._storage.entries.values()) < 100


def test_a_missing_key_is_missing():
    found = PersistentMap({"a": 1}).removing("a")
    with pytest.raises(KeyError):
        found["a"]
    assert repr(found) == "PersistentMap({})"
