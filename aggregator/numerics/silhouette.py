"""The number of groups by average linkage and the mean silhouette (Rousseeuw 1987) of the cosine distance.

Example: four updates in two directions.

    >>> import numpy as np
    >>> from aggregator.numerics.silhouette import find_groups
    >>> similarity = np.array([[1, 0.9, 0, 0], [0.9, 1, 0, 0], [0, 0, 1, 0.8], [0, 0, 0.8, 1]])
    >>> find_groups(similarity, most=2).labels.tolist()
    [0, 0, 1, 1]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.checks import NumericsError, check_square, scipy_module
from aggregator.numerics.clustering import by_first_appearance

INNER_FLOOR: Final = 0.3
"""Least silhouette of groups within a group: devices alike reach .27 by chance where there are ten of them, .23 with twenty."""
INNER_SHARE: Final = 0.75
"""Least silhouette of groups within a group as a share of that of all groups: few coordinates raise both."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of devices.

    Attributes:
        labels: the group of each device, shape (n,), intp, numbered by first appearance.
        silhouette: its mean silhouette, from -1 to 1; 0 for one group.
    """

    labels: NDArray[np.intp]
    silhouette: float

    @property
    def sizes(self) -> list[int]:
        """Return the number of devices in each group."""
        return [int(size) for size in np.bincount(self.labels)]


def find_groups(similarity: NDArray[np.float64], most: int) -> Partition:
    """Return the best partition of devices into at least two groups by average linkage.

    Args:
        similarity: shape (n, n), float64, symmetric, in [-1, 1]: cosines of updates.
        most: largest number of groups, at least 2; never more than n / 2 are tried, but at least two.

    Returns:
        the partition; one group with silhouette 0 if n is below 3 or no partition has a silhouette above 0.

    Raises:
        NumericsError: the arguments do not fit the above.
        ConfigError: scipy is not installed.
    """
    distances = _distances(similarity)
    if most < 2:
        raise NumericsError(f"at most {most} groups, not at least 2")
    size = len(distances)
    one = Partition(np.zeros(size, np.intp), 0.0)
    if size < 3:
        return one
    tree = scipy_module("scipy.cluster.hierarchy").linkage(distances[np.triu_indices(size, 1)], method="average")
    found: dict[int, Partition] = {}
    for count in range(2, min(most, max(2, size // 2)) + 1):
        labels = _cut(tree, size, count)
        found[count] = Partition(labels, silhouette(distances, labels))
    best = max(found.values(), key=lambda partition: partition.silhouette)
    return best if best.silhouette > 0 else one


def find_main_groups(similarity: NDArray[np.float64], most: int, least: int, floor: float) -> Partition:
    """Return `find_groups`, and the groups within the groups found.

    If only one group has ``least`` devices, the others are odd: groups are sought again among the devices of the large one, so
    that they do not hide them. Then groups of `INNER_FLOOR` are sought within each group that is large enough for two: two groups
    may be much alike beside the others, and a device alone in its group has silhouette 0, so the best partition of all rather
    puts it into another group.

    Args:
        similarity: shape (n, n), float64, symmetric, in [-1, 1].
        most: as in `find_groups`.
        least: fewest devices of a group that is not odd.
        floor: least silhouette of groups.

    Returns:
        a partition of all n devices, in which odd ones have groups of their own, with its silhouette before inner groups; one
        group if the silhouettes are below ``floor``.
    """
    places = np.arange(len(similarity))
    labels = np.zeros(len(similarity), np.intp)
    while True:
        found = find_groups(similarity[np.ix_(places, places)], most)
        if found.silhouette < floor:
            return Partition(np.zeros(len(labels), np.intp), found.silhouette)
        labels[places] = found.labels + labels.max() + 1
        large = np.flatnonzero(np.bincount(found.labels) >= least)
        if len(large) != 1:
            inner_floor = max(INNER_FLOOR, INNER_SHARE * found.silhouette)
            labels = _inner(similarity, labels, most, least, inner_floor)
            return Partition(by_first_appearance(labels), found.silhouette)
        places = places[found.labels == large[0]]


def _inner(
    similarity: NDArray[np.float64], labels: NDArray[np.intp], most: int, least: int, floor: float
) -> NDArray[np.intp]:
    """Return ``labels`` (n,) with the groups within each group as groups of their own."""
    labels = labels.copy()
    waiting = [int(group) for group in np.unique(labels)]
    while waiting:
        places = np.flatnonzero(labels == waiting.pop())
        if len(places) < 2 * least:
            continue
        found = find_groups(similarity[np.ix_(places, places)], most)
        if found.silhouette >= floor:
            labels[places] = found.labels + labels.max() + 1
            waiting += [int(group) for group in np.unique(labels[places])]
    return labels


def silhouette(distances: NDArray[np.float64], labels: NDArray[np.intp]) -> float:
    """Return the mean silhouette of a partition.

    The silhouette of a device is (b - a) / max(a, b), where a is its mean distance to the rest of its group and b the least mean
    distance to another group; it is 0 for a device that is alone in its group.

    Args:
        distances: shape (n, n), float64, symmetric, not negative, 0 on the diagonal.
        labels: shape (n,), intp, from 0, each number used; at least two groups.
    """
    counts = np.bincount(labels)
    places = np.arange(len(labels))
    sums = np.stack([distances[:, labels == group].sum(axis=1) for group in range(len(counts))], axis=1)
    within = sums[places, labels] / np.maximum(counts[labels] - 1, 1)
    others = sums / counts
    others[places, labels] = np.inf
    nearest = others.min(axis=1)
    longest = np.maximum(within, nearest)
    values = np.divide(nearest - within, longest, out=np.zeros(len(labels)), where=longest > 0)
    return float(np.where(counts[labels] > 1, values, 0.0).mean())


def join_small(similarity: NDArray[np.float64], labels: NDArray[np.intp], least: int) -> NDArray[np.intp]:
    """Return ``labels`` with every group of fewer than ``least`` devices in the group of the nearest direction.

    The smallest group joins first, the group of the highest mean cosine with it.

    Args:
        similarity: shape (n, n), float64, symmetric: cosines.
        labels: shape (n,), intp, from 0.
        least: fewest devices of a group.

    Returns:
        shape (n,), intp, numbered by first appearance; one group if there are fewer than ``least`` devices in all.
    """
    joined = np.array(labels, np.intp)
    while True:
        groups, sizes = np.unique(joined, return_counts=True)
        if len(groups) == 1 or sizes.min() >= least:
            return by_first_appearance(joined)
        small = groups[sizes.argmin()]
        others = groups[groups != small]
        means = [similarity[np.ix_(joined == small, joined == other)].mean() for other in others]
        joined[joined == small] = others[int(np.argmax(means))]


def _distances(similarity: NDArray[np.float64]) -> NDArray[np.float64]:
    distances = np.clip(1.0 - check_square(similarity, "the matrix of cosines", least=1), 0.0, 2.0)
    # A zero update has cosine 0 with itself.
    np.fill_diagonal(distances, 0.0)
    return distances


def _cut(tree: NDArray[np.float64], size: int, count: int) -> NDArray[np.intp]:
    """Return the labels after all merges but the last ``count - 1``: a cut at a height gives fewer sets on equal heights."""
    labels = np.arange(size)
    for step, (one, other) in enumerate(tree[: size - count, :2].astype(np.intp)):
        labels[(labels == one) | (labels == other)] = size + step
    return by_first_appearance(labels)
