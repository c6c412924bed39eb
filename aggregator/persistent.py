"""Immutable sets, maps and lists that take a change in constant time, for the engine's state.

A changed collection shares its storage with its predecessor. The storage records at which version each key changed, and
a collection reads the storage as of its own version, so earlier collections do not change. For example, with
``a = PersistentSet("x")`` and ``b = a.adding("y")``, ``a`` still has one member and ``b`` two.

A change of the newest version takes constant time on average. A change of an older version copies it first, because the
newest one owns the storage: that is correct, but takes time with the collection's size. The engine always changes
the newest state.

One thread at a time may make changed collections. Others may read any collection meanwhile: a change only adds to the storage,
and each of its steps leaves every entry readable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
T_co = TypeVar("T_co", covariant=True)

_ABSENT: Final[Any] = object()
_SPARE_CHANGES: Final = 64
_CHANGES_PER_ENTRY: Final = 4
"""Storage with more changes for each entry than this, apart from the spare ones, is copied without its history."""
_version_of = itemgetter(0)


class _Storage(Generic[K, V]):
    """The changes of every entry, as (version, value) in ascending order, and the newest version."""

    __slots__ = ("changes", "entries", "newest")

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        self.entries: dict[K, list[tuple[int, V]]] = {key: [(0, value)] for key, value in items}
        self.changes = len(self.entries)
        self.newest = 0


class PersistentMap(Mapping[K, V]):
    """An immutable map.

    Args:
        items: its entries.
    """

    __slots__ = ("_size", "_storage", "_version")

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        pairs = items.items() if isinstance(items, Mapping) else items
        self._storage: _Storage[K, V] = _Storage(pairs)
        self._version = 0
        self._size = len(self._storage.entries)

    def _get(self, key: object) -> Any:
        changes = self._storage.entries.get(key)  # type: ignore[arg-type]
        if changes is None:
            return _ABSENT
        at, value = changes[-1]
        if at > self._version:
            found = bisect_right(changes, self._version, key=_version_of)
            return changes[found - 1][1] if found else _ABSENT
        return value

    def __getitem__(self, key: K) -> V:
        value = self._get(key)
        if value is _ABSENT:
            raise KeyError(key)
        found: V = value
        return found

    def __contains__(self, key: object) -> bool:
        return self._get(key) is not _ABSENT

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        # A copy of the keys, since a change of another collection may add entries to the storage meanwhile.
        return (key for key in list(self._storage.entries) if self._get(key) is not _ABSENT)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"

    def adding(self, key: K, value: V) -> PersistentMap[K, V]:
        """Return the map with ``key`` set to ``value``."""
        held = self._get(key)
        return self if held is value else self._changed(key, value, self._size + (held is _ABSENT))

    def removing(self, key: K) -> PersistentMap[K, V]:
        """Return the map without ``key``; the same map if it has no such key."""
        return self._changed(key, _ABSENT, self._size - 1) if key in self else self

    def _changed(self, key: K, value: V, size: int) -> PersistentMap[K, V]:
        storage = self._storage
        # Only the newest version may write: an older one would overwrite the changes of its successors.
        if self._version != storage.newest or storage.changes > _CHANGES_PER_ENTRY * self._size + _SPARE_CHANGES:
            storage = _Storage(self.items())
        storage.newest += 1
        storage.changes += 1
        held = storage.entries.get(key)
        # Never an empty list, which a reader on another thread could meet.
        if held is None:
            storage.entries[key] = [(storage.newest, value)]
        else:
            held.append((storage.newest, value))
        changed: PersistentMap[K, V] = PersistentMap.__new__(PersistentMap)
        changed._storage, changed._version, changed._size = storage, storage.newest, size
        return changed


class PersistentSet(AbstractSet[K]):
    """An immutable set; it compares and combines with other sets.

    Args:
        members: its members, in the order of iteration.
    """

    __slots__ = ("_map",)

    def __init__(self, members: Iterable[K] = ()) -> None:
        self._map: PersistentMap[K, None] = PersistentMap(dict.fromkeys(members))

    def __contains__(self, member: object) -> bool:
        return member in self._map

    def __iter__(self) -> Iterator[K]:
        return iter(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def adding(self, member: K) -> PersistentSet[K]:
        """Return the set with ``member`` added; the same set if it is a member already."""
        return self._over(self._map.adding(member, None))

    def removing(self, member: K) -> PersistentSet[K]:
        """Return the set without ``member``; the same set if it is no member."""
        return self._over(self._map.removing(member))

    def _over(self, changed: PersistentMap[K, None]) -> PersistentSet[K]:
        if changed is self._map:
            return self
        made: PersistentSet[K] = PersistentSet.__new__(PersistentSet)
        made._map = changed
        return made


class PersistentList(Sequence[T_co]):
    """An immutable list that grows at its end.

    Args:
        items: its items.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: Iterable[T_co] = ()) -> None:
        self._items = list(items)
        self._length = len(self._items)

    @overload
    def __getitem__(self, index: int) -> T_co: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...

    def __getitem__(self, index: int | slice) -> T_co | tuple[T_co, ...]:
        places = range(self._length)[index]
        return self._items[places] if isinstance(places, int) else tuple(self._items[i] for i in places)

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, PersistentList | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def appending(self, item: T_co) -> PersistentList[T_co]:  # type: ignore[misc]
        """Return the list with one more item."""
        # A shorter list than the storage is an earlier version: it copies, so that later versions keep their items.
        items = self._items if len(self._items) == self._length else self._items[: self._length]
        items.append(item)
        longer: PersistentList[T_co] = PersistentList.__new__(PersistentList)
        longer._items, longer._length = items, self._length + 1
        return longer
