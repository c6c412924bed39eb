"""The optimal bipartition against brute force, a literal union-find Algorithm 1, and naive complete linkage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster
from scipy.cluster.hierarchy import linkage as linkage_tree
from scipy.spatial.distance import squareform

from aggregator.numerics.backend import cosine_matrix
from aggregator.numerics.bipartition import LINKAGES, Bipartition, balanced_bipartition, bipartition
from aggregator.numerics.checks import NumericsError
from shoal.errors import ConfigError, IntegrityError

Matrix = NDArray[np.float64]


def random_similarity(rng: np.random.Generator, size: int, *, decimals: int | None = None) -> Matrix:
    rows = rng.standard_normal((size, 6))
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    similarity = rows @ rows.T
    similarity = (similarity + similarity.T) / 2
    return similarity if decimals is None else similarity.round(decimals)


def cross_max(similarity: Matrix, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    return float(similarity[np.ix_(left, right)].max())


def brute_force(similarity: Matrix) -> float:
    """The smallest cross similarity over all bipartitions (cfl Eq. 35)."""
    size = len(similarity)
    best = np.inf
    for count in range(size - 1):
        for rest in itertools.combinations(range(1, size), count):
            left = (0, *rest)
            right = tuple(sorted(set(range(size)) - set(left)))
            best = min(best, cross_max(similarity, left, right))
    return best


def naive_complete(similarity: Matrix) -> set[frozenset[int]]:
    """Complete linkage by looking at every pair of clusters for every merge."""
    clusters = [frozenset([i]) for i in range(len(similarity))]
    while len(clusters) > 2:
        one, other = max(
            itertools.combinations(clusters, 2), key=lambda pair: similarity[np.ix_(list(pair[0]), list(pair[1]))].min()
        )
        clusters = [cluster for cluster in clusters if cluster not in (one, other)] + [one | other]
    return set(clusters)


def check_shape(result: Bipartition, size: int) -> None:
    assert result.left[0] == 0
    assert result.right
    assert (list(result.left), list(result.right)) == (sorted(result.left), sorted(result.right))
    assert sorted(result.left + result.right) == list(range(size))


@pytest.mark.parametrize("size", range(2, 11))
@pytest.mark.parametrize("decimals", [None, 1])
def test_single_reaches_the_optimum(size: int, decimals: int | None) -> None:
    """Single reaches the optimum of brute force."""
    rng = np.random.default_rng(size)
    for _ in range(20 if size < 9 else 5):
        similarity = random_similarity(rng, size, decimals=decimals)
        result = bipartition(similarity)
        check_shape(result, size)
        assert result.cross_max == brute_force(similarity)
        assert result.cross_max == cross_max(similarity, result.left, result.right)


@pytest.mark.parametrize("size", [2, 3, 9, 25])
def test_complete_equals_the_naive_one(size: int) -> None:
    """Complete equals naive complete linkage."""
    rng = np.random.default_rng(300 + size)
    for _ in range(10):
        similarity = random_similarity(rng, size)
        result = bipartition(similarity, "complete")
        check_shape(result, size)
        assert {frozenset(result.left), frozenset(result.right)} == naive_complete(similarity)
        assert result.cross_max == cross_max(similarity, result.left, result.right)


def test_the_linkages_differ_on_a_chain() -> None:
    """Single linkage follows a chain of near neighbours, complete linkage cuts it in the middle."""
    spots = np.array([0.0, 1.0, 2.1, 3.3, 4.6, 6.5])
    similarity = -np.abs(spots[:, None] - spots[None, :])
    assert bipartition(similarity).right == (5,)
    assert bipartition(similarity, "complete").right == (4, 5)


@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_equal_similarities_give_halves(linkage: str) -> None:
    """All equal similarities still give two halves."""
    result = bipartition(np.full((7, 7), 0.25), linkage)
    check_shape(result, 7)
    assert result.cross_max == 0.25


@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_the_diagonal_is_not_used(linkage: str) -> None:
    similarity = random_similarity(np.random.default_rng(1), 12)
    before, other = similarity.copy(), similarity.copy()
    np.fill_diagonal(other, 0.0)
    assert bipartition(similarity, linkage) == bipartition(other, linkage)
    np.testing.assert_array_equal(similarity, before, "the argument is left alone")


def test_two_clear_groups_of_300_are_found() -> None:
    """A size beyond one tile of the symmetry check."""
    group = np.random.default_rng(3).permutation(np.arange(300) % 2)
    result = bipartition(np.where(group[:, None] == group[None, :], 0.8, -0.6))
    assert result.left == tuple(np.flatnonzero(group == group[0]).tolist())
    assert result.cross_max == -0.6


BAD = {
    "nan": ([(4, 200)], np.nan),
    "inf": ([(4, 200)], np.inf),
    "asymmetric": ([(4, 200)], 0.5),
    "diagonal nan": ([(5, 5)], np.nan),
    "diagonal inf": ([(5, 5)], np.inf),
    "symmetric nan": ([(1, 2), (2, 1)], np.nan),
    "symmetric inf": ([(1, 2), (2, 1)], np.inf),
    "symmetric -inf": ([(1, 2), (2, 1)], -np.inf),
}


@pytest.mark.parametrize(("places", "value"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_malformed_matrix_is_refused(places: list[tuple[int, int]], value: float, linkage: str) -> None:
    """A matrix that is not finite and symmetric is refused."""
    similarity = np.zeros((300, 300))
    similarity[tuple(zip(*places, strict=True))] = value
    with pytest.raises(NumericsError, match="not symmetric, or holds NaN"):
        bipartition(similarity, linkage)


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (2, 3), (4,), (2, 2, 2)])
def test_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(NumericsError):
        bipartition(np.zeros(shape))


def test_errors_are_ours_and_value_errors() -> None:
    """Errors are both ours and value errors."""
    with pytest.raises(ValueError, match="two devices") as caught:
        bipartition(np.zeros((1, 1)))
    assert isinstance(caught.value, IntegrityError)


def test_an_unknown_linkage_is_refused() -> None:
    with pytest.raises(ConfigError, match="ward"):
        bipartition(np.zeros((3, 3)), "ward")


@pytest.mark.parametrize("linkage", LINKAGES)
def test_odd_device_hides_no_groups(linkage: str) -> None:
    """Device 8 resembles nobody: the weakest link is its own, and the groups are behind it."""
    similarity = np.full((9, 9), 0.1)
    similarity[:4, :4] = similarity[4:8, 4:8] = 0.8
    similarity[8] = similarity[:, 8] = -0.2
    similarity[8, 0] = similarity[0, 8] = 0.0
    np.fill_diagonal(similarity, 1.0)
    assert bipartition(similarity).right == (8,)
    found = balanced_bipartition(similarity, linkage, 3)
    if linkage == "single":
        assert found == Bipartition((0, 1, 2, 3, 8), (4, 5, 6, 7), 0.1)
    else:
        assert found is None or min(len(found.left), len(found.right)) >= 3


def test_impossible_halves_are_none() -> None:
    """Halves that can't be large enough are none."""
    assert balanced_bipartition(np.eye(5), "single", 3) is None
    chain = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.8], [0.1, 0.8, 1.0]])
    assert balanced_bipartition(chain, "single", 1) == bipartition(chain)


@pytest.mark.parametrize("seed", range(6))
def test_average_linkage_is_scipys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    similarity = cosine_matrix(list(rng.standard_normal((12, 4)).astype(np.float32)))
    distances = squareform(1.0 - similarity, checks=False)
    labels = fcluster(linkage_tree(distances, "average"), 2, "maxclust")
    found = bipartition(similarity, "average")
    assert set(np.flatnonzero(labels != labels[0])) == set(found.right)
