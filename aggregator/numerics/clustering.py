"""Label devices: k-means++ on small embeddings or on a Gram matrix, complete linkage on distances.

Labels are numbered by first appearance, so they do not depend on which centre a start happened to draw first.
"""

from __future__ import annotations

import warnings
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.checks import check_square, scipy_module, sklearn_module
from aggregator.numerics.errors import NumericsError

STARTS: Final = 10
"""Seedings of k-means, of which the best is kept."""

SAME_ROW: Final = 1e-7
"""Below this share of the largest coordinate rows differ by rounding alone: float32 products are not better."""


def kmeans(rows: NDArray[np.float64], k: int, seed: int) -> NDArray[np.intp]:
    """Return the label of every row by k-means++ (fedgroup Alg. 3 line 14), the best of ``STARTS`` starts.

    Runs on one thread, whatever the environment says, so that equal input has equal labels.

    Args:
        rows: shape (n, p), float64, finite, n and p at least 1.
        k: most labels, at least 1. Where there are no more than k different rows, each has its own label, so fewer
            than k may come back; rows within ``SAME_ROW`` of the rows' extent count as equal.
        seed: of the draw of first centres, at least 0.

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
        # Rows on two sides of a rounding step may be equal after all; fewer labels are a stated outcome here.
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        fitted = cluster.KMeans(
            n_clusters=k, init="k-means++", n_init=STARTS, random_state=seed % 2**32, algorithm="lloyd"
        ).fit(values)
    return by_first_appearance(fitted.labels_)


def kmeans_from_gram(gram: NDArray[np.float64], k: int, seed: int) -> NDArray[np.intp]:
    """Return ``kmeans`` of the vectors behind ``gram`` (ifca extended section 4.1, on masked updates).

    The centred Gram matrix has the eigenvectors V and eigenvalues l; the rows of V sqrt(l) lie as far from each other
    as the vectors do, in n coordinates at most.

    Args:
        gram: shape (n, n), float64, symmetric, finite, n at least 1.
        k: most labels, at least 1.
        seed: as in ``kmeans``.

    Returns:
        shape (n,), intp, numbered by first appearance.

    Raises:
        NumericsError: the arguments do not fit the above.
        ConfigError: scikit-learn is not installed.
    """
    return kmeans(centred_embedding(gram), k, seed)


def centred_embedding(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return points with the same distances as the vectors behind ``gram``, their mean at 0.

    Args:
        gram: shape (n, n), float64, symmetric, finite, n at least 1.

    Returns:
        shape (n, r), float64, r from 1 to n; axes of no extent are left out.

    Raises:
        NumericsError: ``gram`` is not as above.
    """
    matrix = check_square(gram, "the Gram matrix", least=1)
    means = matrix.mean(axis=0)
    centred = matrix - means[:, None] - means[None, :] + means.mean()
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    # What centring leaves of rounding is noise in proportion to the matrix, not to the centred one.
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
        k: sets, at least 1; each device is one of its own where k is n or more.

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
    return by_first_appearance(same_as.reshape(-1))


def by_first_appearance(labels: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return ``labels``, shape (n,), renumbered 0, 1, ... in the order in which they first appear."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    renumbered: NDArray[np.intp] = rank[inverse.reshape(-1)]
    return renumbered
