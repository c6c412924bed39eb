"""The cosines between the updates of a round, for the record: a sample of bounded size.

A mask keeps cosines, so their matrix, ordered by cluster, shows a person whether the clusters are right. The record has at most
MOST_DEVICES of the devices, evenly drawn from the clusters, and cosines in hundredths. Long updates are compared on
MOST_COORDINATES of their coordinates; under a rotation the standard error of such a cosine is at most 0.006.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aggregator.numerics.parted import is_parted
from aggregator.numerics.similarity import cosine_matrix
from aggregator.strategies.base import ClientUpdate
from shoal.types import Float32Vector

MOST_DEVICES: Final = 48
MOST_COORDINATES: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Cosines:
    """The cosines between the updates of some devices.

    Attributes:
        devices: n names, in order of their clusters.
        hundredths: base64 of the n (n - 1) / 2 cosines above the diagonal, row by row, each times 100 as a signed byte.
    """

    devices: tuple[str, ...]
    hundredths: str


def sampled_cosines(updates: Sequence[ClientUpdate], clusters: Mapping[str, int]) -> Cosines | None:
    """Return the cosines of at most MOST_DEVICES updates; None if fewer than two devices have sent one.

    Args:
        updates: of one round, each with or without a vector.
        clusters: device -> cluster after the round; devices without one come last.
    """
    last = 1 + max(clusters.values(), default=0)
    rows = sorted((u for u in updates if u.vector is not None), key=lambda u: (clusters.get(u.device, last), u.device))
    chosen = [rows[i * len(rows) // MOST_DEVICES] for i in range(MOST_DEVICES)] if len(rows) > MOST_DEVICES else rows
    if len(chosen) < 2:
        return None
    step = -(-len(chosen[0].row) // MOST_COORDINATES)
    cosines = cosine_matrix([_every(u.row, step) for u in chosen])
    above = np.rint(100 * cosines[np.triu_indices(len(chosen), 1)]).astype(np.int8)
    return Cosines(tuple(u.device for u in chosen), base64.b64encode(above.tobytes()).decode())


def _every(row: Float32Vector, step: int) -> Float32Vector:
    """Return every ``step``-th coordinate, in one piece."""
    return row[::step] if is_parted([row]) else np.ascontiguousarray(row[::step])
