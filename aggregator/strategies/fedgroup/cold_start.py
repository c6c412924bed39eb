"""FedGroup's cold starts: from pre-training updates to groups (fedgroup Alg. 3), and newcomers to a group (Eq. 9)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import Backend
from aggregator.numerics.clustering import complete_linkage, kmeans
from aggregator.numerics.embedding import edc, madc
from aggregator.numerics.similarity import cosine_matrix, products
from aggregator.strategies.base import norm_of
from shoal.types import Float32Vector

FEWEST_FOR_MADC = 3
"""Eq. 7 divides by n - 2."""


def fewest_updates(groups: int, measure: str) -> int:
    """Return how many pre-training updates the measure needs to tell ``groups`` groups apart."""
    return max(groups, 2, FEWEST_FOR_MADC if measure == "madc" else 0)


def group_updates(
    rows: list[Float32Vector], groups: int, measure: str, seed: int, backend: Backend | None = None
) -> NDArray[np.intp]:
    """Return the group of every pre-training update (fedgroup Alg. 3, lines 7 to 14).

    Args:
        rows: n updates (d,), float32, masked or not; at least `fewest_updates` of them.
        groups: m.
        measure: ``edc``: k-means++ on the cosines to the m top singular directions (Eq. 8); ``madc``: complete linkage
            on the mean absolute differences of cosines (Eq. 7).
        seed: of k-means.
        backend: computes dot products and distances; numpy when absent.

    Returns:
        shape (n,), intp, numbered by first appearance; fewer than m numbers where there are fewer different updates.
    """
    if measure == "madc":
        return complete_linkage(madc(cosine_matrix(rows, backend=backend), backend=backend), groups)
    return kmeans(edc(rows, groups, backend=backend), groups, seed)


def random_centres(rows: list[Float32Vector], groups: int, seed: int) -> list[int]:
    """Return the places of ``groups`` different updates drawn as centres: the ablation RCC of fedgroup section IV-B."""
    return sorted(np.random.default_rng([seed, groups]).choice(len(rows), groups, replace=False).tolist())


def nearest_directions(
    rows: list[Float32Vector], directions: list[Float32Vector], backend: Backend | None = None
) -> list[int]:
    """Return for every update the direction of highest cosine (fedgroup Eq. 9, for both measures of the cold start).

    Args:
        rows: n updates (d,), float32.
        directions: the groups' (d,), float32, under the same mask.
        backend: computes dot products; numpy when absent.

    Returns:
        n places in ``directions``; the first of equals.
    """
    found = products(rows, directions, backend=backend)
    lengths = np.array([norm_of(v) for v in directions])
    # The update's own length is common to all its cosines.
    cosines = np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0)
    return [int(j) for j in cosines.argmax(axis=1)]
