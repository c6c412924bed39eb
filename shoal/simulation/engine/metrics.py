"""Compare a clustering with the true groups: purity and adjusted Rand index."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray


def contingency(found: Sequence[Hashable], truth: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return the number of devices in each pair of found cluster and true group, shape (clusters, groups), int64."""
    rows = {label: i for i, label in enumerate(dict.fromkeys(found))}
    columns = {label: i for i, label in enumerate(dict.fromkeys(truth))}
    table = np.zeros((len(rows), len(columns)), np.int64)
    for a, b in zip(found, truth, strict=True):
        table[rows[a], columns[b]] += 1
    return table


def purity(found: Sequence[Hashable], truth: Sequence[Hashable]) -> float:
    """Return the share of devices that belong to the largest true group of their cluster."""
    table = contingency(found, truth)
    return float(table.max(axis=1).sum() / table.sum())


def adjusted_rand(found: Sequence[Hashable], truth: Sequence[Hashable]) -> float:
    """Return the adjusted Rand index (Hubert and Arabie, 1985): 1 for the same partition, about 0 for a random one."""
    table = contingency(found, truth).astype(np.float64)

    def pairs(counts: NDArray[np.float64]) -> float:
        return float((counts * (counts - 1)).sum() / 2)

    both, rows, columns = pairs(table), pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    total = pairs(np.array([table.sum()]))
    if total == 0:
        return 1.0
    expected = rows * columns / total
    most = (rows + columns) / 2
    return 1.0 if most == expected else (both - expected) / (most - expected)
