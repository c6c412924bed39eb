"""Persistent collections against plain ones, through random changes of the newest and of earlier versions."""

import pytest

from aggregator.persistent import PersistentList, PersistentMap, PersistentSet


def test_list_grows_from_any_of_its_versions():
    first = PersistentList("a")
    second = first.appending("b")
    other = first.appending("c")
    assert (first, second, other) == (("a",), ("a", "b"), ("a", "c"))
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
