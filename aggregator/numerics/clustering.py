"""Label devices: k-means++ on small embeddings or on a Gram matrix, complete linkage on distances.

Labels are numbered by first appearance, so they do not depend on the order in which centres were drawn.
"""

from __future__ import annotations

import warnings
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.checks import NumericsError, check_square, scipy_module, sklearn_module

STARTS: Final = 10
"""Number of starts of k-means, of which the best is used."""

SAME_ROW: Final = 1e-7
"""Rows that differ by less than this share of the largest coordinate differ by rounding of float32 products alone."""


def kmeans(rows: NDArray[np.float64], k: int, seed: int) -> NDArray[np.intp]:
    """Return the label of every row by k-means++ (fedgroup Alg. 3 line 14), the best of ``STARTS`` starts.

    Always runs on one thread, so that equal input has equal labels.

    Args:
        rows: shape (n, p), float64, finite, n and p at least 1.
        k: largest number of labels, at least 1. If there are at most k different rows, each has its own label, so there
            may be fewer than k; rows within ``SAME_ROW`` of the rows' extent count as equal.
        seed: seed of the draw of first centres, at least 0.

    Returns:
        shape (n,), intp, numbered by first appearance.

    Raises:
        NumericsError: the arguments do not fit the above.
        ConfigError: scikit-learn is not installed.
    """
    values = np.ascontiguousarray(rows, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise NumericsError(f"rows to cluster have shape {values.shape}, not (n, p)")
    if not np.isfinite(values).all():
        raise NumericsError("rows to cluster hold NaN or infinities")
    if k < 1 or seed < 0:
        raise NumericsError(f"k-means with k {k} and seed {seed}; k is at least 1, the seed at least 0")
    same_as = _equal_rows(values)
    if same_as.max() < k:
        return same_as
    cluster = sklearn_module("sklearn.cluster")
    limits = sklearn_module("threadpoolctl").threadpool_limits
    exceptions = sklearn_module("sklearn.exceptions")
    with limits(limits=1), warnings.catch_warnings():
        # `_equal_rows` may separate equal rows at a rounding step. sklearn then warns of fewer labels, which are allowed.
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        fitted = cluster.KMeans(
            n_clusters=k,
            init="k-means++",
            n_init=STARTS,
            # scikit-learn takes seeds of at most 32 bits.
            random_state=seed % 2**32,
            algorithm="lloyd",
        ).fit(values)
    return by_first_appearance(fitted.labels_)


def kmeans_from_gram(gram: NDArray[np.float64], k: int, seed: int) -> NDArray[np.intp]:
    """Return ``kmeans`` of the vectors with the dot products ``gram`` (ifca extended section 4.1, on masked updates).

    With the eigenvectors V and eigenvalues l of the centred Gram matrix, the rows of V sqrt(l) have the same distances as
    the vectors, in at most n coordinates.

    Args:
        gram: shape (n, n), float64, symmetric, finite, n at least 1.
        k: largest number of labels, at least 1.
        seed: as in ``kmeans``.

    Returns:
        shape (n,), intp, numbered by first appearance.

    Raises:
        NumericsError: the arguments do not fit the above.
        ConfigError: scikit-learn is not installed.
    """
    return kmeans(centred_embedding(gram), k, seed)


def centred_embedding(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return points with mean 0 and the same distances as the vectors with the dot products ``gram``.

    Args:
        gram: shape (n, n), float64, symmetric, finite, n at least 1.

    Returns:
        shape (n, r), float64, r from 1 to n; axes without extent are left out.

    Raises:
        NumericsError: ``gram`` is not as above.
    """
    matrix = check_square(gram, "the Gram matrix", least=1)
    means = matrix.mean(axis=0)
    centred = matrix - means[:, None] - means[None, :] + means.mean()
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    # Rounding errors of centring are in proportion to the entries before it, so the floor is too.
    floor = len(matrix) * np.finfo(np.float64).eps * float(np.abs(matrix).max())
    kept = np.flatnonzero(values > floor)
    if not kept.size:
        return np.zeros((len(matrix), 1))
    points: NDArray[np.float64] = (vectors[:, kept] * np.sqrt(values[kept]))[:, ::-1]
    return points


def complete_linkage(distances: NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """Return the label of every device by complete linkage cut at ``k`` sets (fedgroup Alg. 3 line 10).

    Args:
        distances: shape (n, n), float64, symmetric to 1e-9, finite, not negative, n at least 1; the diagonal is not
            used.
        k: number of sets, at least 1; if it is n or more, each device is a set of its own.

    Returns:
        shape (n,), intp, numbered by first appearance, with exactly min(k, n) labels.

    Raises:
        NumericsError: the arguments do not fit the above.
        ConfigError: scipy is not installed.
    """
    matrix = check_square(distances, "the distance matrix", least=1)
    if k < 1:
        raise NumericsError(f"complete linkage cut at {k} sets")
    size = len(matrix)
    if size == 1 or k >= size:
        return np.arange(size)
    condensed = matrix[np.triu_indices(size, 1)]
    if (condensed < 0).any():
        raise NumericsError("the distance matrix holds negative distances")
    tree = scipy_module("scipy.cluster.hierarchy").linkage(condensed, method="complete")
    # The first n - k merges, not a cut at a height: on equal heights that would give fewer sets.
    labels = np.arange(size)
    for step, (one, other) in enumerate(tree[: size - k, :2].astype(np.intp)):
        labels[(labels == one) | (labels == other)] = size + step
    return by_first_appearance(labels)


def _equal_rows(values: NDArray[np.float64]) -> NDArray[np.intp]:
    centred = values - values.mean(axis=0)
    extent = float(np.abs(centred).max())
    if extent <= SAME_ROW * float(np.abs(values).max()):
        return np.zeros(len(values), dtype=np.intp)
    _, same_as = np.unique(np.round(centred / (extent * SAME_ROW)), axis=0, return_inverse=True)
    # NumPy 2.0 alone returns the inverse of rows with a second axis.
    return by_first_appearance(same_as.reshape(-1))


def by_first_appearance(labels: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return ``labels``, shape (n,), renumbered 0, 1, ... in the order in which they first appear."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    renumbered: NDArray[np.intp] = rank[inverse.reshape(-1)]
    return renumbered
