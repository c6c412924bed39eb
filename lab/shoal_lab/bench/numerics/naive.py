"""Naive forms of the kernels, as a reader of the papers would write them first, for comparison."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import DisjointSet

from aggregator.numerics.checks import sklearn_module


def union_find(similarity: NDArray[np.float64]) -> int:
    """Merge the most similar pairs until two sets remain, as cfl Alg. 1 says; return the number of sets.

    Args:
        similarity: shape (m, m), float64, symmetric.
    """
    above, right = np.triu_indices(len(similarity), 1)
    sets = DisjointSet(range(len(similarity)))
    for pair in np.argsort(-similarity[above, right], kind="stable"):
        if sets.n_subsets == 2:
            break
        sets.merge(above[pair], right[pair])
    return int(sets.n_subsets)


def randomised_edc(updates: NDArray[np.float32], directions: int) -> NDArray[np.float32]:
    """Return EDC (fedgroup Eq. 8) by scikit-learn's randomised SVD of dW^T and cosines, shape (n, m), float32.

    Args:
        updates: shape (n, d), float32.
        directions: m.
    """
    decomposition = sklearn_module("sklearn.decomposition").TruncatedSVD(directions, random_state=0)
    vectors = decomposition.fit_transform(updates.T)
    pairwise = sklearn_module("sklearn.metrics.pairwise")
    return np.asarray(pairwise.cosine_similarity(updates, vectors.T))


def cubic_madc(similarity: NDArray[np.float64], start: int, stop: int) -> NDArray[np.float64]:
    """Return rows ``start`` to ``stop`` of MADC (fedgroup Eq. 7) through all differences at once, (n^3 in full).

    Args:
        similarity: shape (n, n), float64, symmetric, 1 on the diagonal.
        start: first row.
        stop: row after the last.

    Returns:
        shape (stop - start, n), float64.
    """
    size = len(similarity)
    total = np.abs(similarity[start:stop, None, :] - similarity[None, :, :]).sum(axis=2)
    total -= 2.0 * np.abs(1.0 - similarity[start:stop])
    total[np.arange(stop - start), np.arange(start, stop)] = 0.0
    return np.asarray(total / (size - 2), np.float64)
