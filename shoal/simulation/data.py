"""Data of simulated devices: shards of samples, device names, and true groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge_client.learning.standardisation import standardised
from edge_client.storage.scales import Scale
from shoal.errors import DataError


@dataclass(frozen=True, slots=True)
class Shard:
    """Samples and labels of the same length; may be empty.

    Attributes:
        x: shape (n, *input shape), float32 (int64 for sequences).
        y: shape (n, *label shape), int64 (float32 for regression).
    """

    x: NDArray[Any]
    y: NDArray[Any]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"a shard of {len(self.x)} samples and {len(self.y)} labels")

    def __len__(self) -> int:
        return len(self.x)

    def scaled(self, scale: Scale | None) -> Shard:
        """Return the samples in the units of a scale; the shard itself without one, or if it is empty."""
        if scale is None or not len(self):
            return self
        return Shard(standardised(np.asarray(self.x, np.float32), scale), self.y)

    @classmethod
    def none(cls) -> Self:
        """Return a shard of no samples."""
        return cls(np.empty((0,), np.float32), np.empty((0,), np.int64))


@dataclass(frozen=True, slots=True)
class Population:
    """Every device's data.

    Attributes:
        train: one shard a device, at least one sample each.
        validation, test: one shard a device, possibly empty; an empty tuple is replaced by empty shards.
        groups: each device's true group, or None if there are none.
        probes: test shards that belong to no device (IFCA's test clients), used by the protocol ``argmin`` if any.
        probe_groups: each probe's true group, or None.
        names: in ascending order; dev-0000, dev-0001, ... if empty.
    """

    train: tuple[Shard, ...]
    validation: tuple[Shard, ...] = ()
    test: tuple[Shard, ...] = ()
    groups: tuple[int, ...] | None = None
    probes: tuple[Shard, ...] = ()
    probe_groups: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.train)
        if count == 0 or not all(len(s) for s in self.train):
            raise DataError("every simulated device needs at least one training sample")
        for share in ("validation", "test"):
            if not getattr(self, share):
                object.__setattr__(self, share, tuple(Shard.none() for _ in range(count)))
        if not self.names:
            object.__setattr__(self, "names", tuple(f"dev-{i:04d}" for i in range(count)))
        lengths = {len(self.train), len(self.validation), len(self.test), len(self.names)}
        if self.groups is not None:
            lengths.add(len(self.groups))
        if lengths != {count}:
            raise DataError(f"a population of {count} devices with shares, names or groups for {sorted(lengths)}")
        if list(self.names) != sorted(set(self.names)):
            raise DataError("device names must differ and be in ascending order")
        if self.probe_groups is not None and len(self.probe_groups) != len(self.probes):
            raise DataError(f"{len(self.probes)} probes with {len(self.probe_groups)} groups")

    def __len__(self) -> int:
        return len(self.train)

    def of(self, places: Sequence[int] | NDArray[np.int64]) -> Population:
        """Return the devices at ``places`` (c,), ascending; without probes."""

        def some(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[int(i)] for i in places)

        return Population(
            some(self.train),
            some(self.validation),
            some(self.test),
            None if self.groups is None else some(self.groups),
            names=some(self.names),
        )

    def mapped(self, change: Callable[[Shard, int], Shard]) -> Population:
        """Return the population with ``change(shard, place)`` in place of each device's shares; probes as they are."""
        train, validation, test = (
            tuple(change(shard, place) for place, shard in enumerate(shards))
            for shards in (self.train, self.validation, self.test)
        )
        return dataclasses.replace(self, train=train, validation=validation, test=test)

    def scaled(self, scales: Sequence[Scale | None]) -> Population:
        """Return the population with each device's shares in the units of its scale; itself without scales."""
        return self.mapped(lambda shard, place: shard.scaled(scales[place])) if scales else self

    @property
    def samples(self) -> NDArray[np.int64]:
        """Training samples of each device, shape (m,), int64."""
        return np.array([len(s) for s in self.train], np.int64)


def shards_of(x: NDArray[Any], y: NDArray[Any], cuts: Sequence[int] | None = None) -> tuple[Shard, ...]:
    """Return shards that are views of stacked or concatenated arrays; nothing is copied.

    Args:
        x: shape (m, n, ...) if ``cuts`` is None, else (total, ...).
        y: shape (m, n, ...) or (total, ...).
        cuts: each device's number of samples, adding up to ``total``.
    """
    if cuts is None:
        return tuple(Shard(a, b) for a, b in zip(x, y, strict=True))
    ends = np.cumsum(np.asarray(cuts, np.int64))
    if len(ends) == 0 or ends[-1] != len(x):
        raise DataError(f"{len(x)} samples cut into {int(ends[-1]) if len(ends) else 0}")
    return tuple(Shard(x[e - c : e], y[e - c : e]) for c, e in zip(cuts, ends, strict=True))
