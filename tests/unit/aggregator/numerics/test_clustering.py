"""k-means and complete linkage: true groups, and few or equal rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage

from aggregator.numerics.backend import gram
from aggregator.numerics.checks import NumericsError
from aggregator.numerics.clustering import (
    by_first_appearance,
    centred_embedding,
    complete_linkage,
    kmeans,
    kmeans_from_gram,
)

ROOT = Path(__file__).parents[4]
TRUTH = np.array([0, 1, 0, 2, 1, 2, 2, 0, 1, 0, 1, 2])


def points(spread: float = 0.1, d: int = 40) -> NDArray[np.float32]:
    """Return vectors of three groups, shape (12, d), float32."""
    rng = np.random.default_rng(4)
    centres = rng.standard_normal((3, d))
    return (centres[TRUTH] + spread * rng.standard_normal((12, d))).astype(np.float32)


def test_kmeans_finds_the_groups() -> None:
    """Kmeans finds the groups numbered by first appearance."""
    np.testing.assert_array_equal(kmeans(points().astype(np.float64), 3, seed=7), TRUTH)


def test_kmeans_of_gram_equals_vectors() -> None:
    """Overlapping groups, far from the origin: same seed, same labels."""
    rows = points(spread=0.9) + np.float32(2.0)
    for seed in range(5):
        direct = kmeans(rows.astype(np.float64), 3, seed)
        np.testing.assert_array_equal(kmeans_from_gram(gram(rows), 3, seed), direct)


def test_the_embedding_keeps_all_distances() -> None:
    rows = points(spread=0.9).astype(np.float64)
    found = centred_embedding(rows @ rows.T)
    assert found.shape[1] == 11
    expected = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found[None], axis=2), expected, atol=1e-10)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-10)


def test_the_same_seed_gives_the_same_labels() -> None:
    rows = np.random.default_rng(0).standard_normal((60, 3))
    np.testing.assert_array_equal(kmeans(rows, 4, 11), kmeans(rows, 4, 11))
    assert len(np.unique(kmeans(rows, 4, 11))) == 4


def test_few_rows_stand_alone() -> None:
    """Fewer rows than labels each stand alone."""
    np.testing.assert_array_equal(kmeans(points()[:3].astype(np.float64), 5, 0), [0, 1, 2])
    np.testing.assert_array_equal(complete_linkage(1.0 - np.eye(3), 5), [0, 1, 2])
    np.testing.assert_array_equal(complete_linkage(np.zeros((1, 1)), 1), [0])


def test_equal_rows_share_a_label() -> None:
    rows = np.array([[1.0, 2], [3, 4], [1, 2], [1, 2]])
    np.testing.assert_array_equal(kmeans(rows, 3, 0), [0, 1, 0, 0])
    np.testing.assert_array_equal(kmeans(np.ones((4, 2)), 3, 0), [0, 0, 0, 0])
    np.testing.assert_array_equal(kmeans(np.zeros((4, 2)), 1, 0), [0, 0, 0, 0])


def test_equal_vectors_share_a_label() -> None:
    """What the eigenvalues' rounding leaves between copies does not count as a difference."""
    rows = points()[[0, 1, 0, 1, 1]]
    np.testing.assert_array_equal(kmeans_from_gram(gram(rows), 4, 0), [0, 1, 0, 1, 1])
    np.testing.assert_array_equal(kmeans_from_gram(np.zeros((3, 3)), 2, 0), [0, 0, 0])


def test_complete_linkage_equals_scipys() -> None:
    """Complete linkage finds the groups and equals scipys cut."""
    rows = points(spread=0.6).astype(np.float64)
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    condensed = distances[np.triu_indices(12, 1)]
    for k in (1, 2, 3, 5, 11):
        cut = fcluster(linkage(condensed, "complete"), k, criterion="maxclust")
        np.testing.assert_array_equal(complete_linkage(distances, k), by_first_appearance(cut))
    np.testing.assert_array_equal(complete_linkage(distances, 3), TRUTH)


def test_equal_distances_still_give_k_sets() -> None:
    """A cut at a height would give one set."""
    assert len(np.unique(complete_linkage(1.0 - np.eye(6), 4))) == 4


def test_what_has_no_answer_is_refused() -> None:
    rows = points().astype(np.float64)
    bad = rows.copy()
    bad[1, 1] = np.nan
    for call, message in (
        (lambda: kmeans(bad, 2, 0), "NaN"),
        (lambda: kmeans(rows[0], 2, 0), "shape"),
        (lambda: kmeans(rows, 0, 0), "k 0"),
        (lambda: kmeans(rows, 2, -1), "seed"),
        (lambda: kmeans_from_gram(np.full((3, 3), np.inf), 2, 0), "NaN"),
        (lambda: complete_linkage(np.ones((2, 3)), 2), r"\(n, n\)"),
        (lambda: complete_linkage(np.array([[0, -1.0, 1], [-1, 0, 1], [1, 1, 0]]), 2), "negative"),
        (lambda: complete_linkage(np.eye(3), 0), "0 sets"),
    ):
        with pytest.raises(NumericsError, match=message):
            call()


def test_missing_packages_are_named() -> None:
    """An aggregator without scikit-learn and scipy can run other algorithms; only these calls end, with a hint."""
    code = (
        "import sys\n"
        "for name in ('sklearn', 'sklearn.cluster', 'scipy', 'scipy.cluster', 'scipy.spatial'): sys.modules[name] = None\n"
        "import numpy as np\n"
        "from aggregator.numerics.clustering import complete_linkage, kmeans\n"
        "from aggregator.numerics.embedding import madc\n"
        "from shoal.errors import ConfigError\n"
        "for call in (lambda: kmeans(np.eye(4), 2, 0), lambda: complete_linkage(np.ones((4, 4)), 2),"
        " lambda: madc(np.eye(4))):\n"
        "    try:\n        call()\n"
        "    except ConfigError as error:\n        assert 'shoal[aggregator]' in error.hint\n"
        "    else:\n        raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_heavy_packages_load_when_called() -> None:
    """Heavy packages load only when called."""
    code = (
        "import sys; from aggregator.numerics import clustering, embedding;"
        "assert not {'sklearn', 'scipy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
