"""The number of groups from matrices made by hand, against scikit-learn, and small groups that join others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import silhouette_score

from aggregator.numerics.backend import cosine_matrix
from aggregator.numerics.checks import NumericsError
from aggregator.numerics.silhouette import find_groups, find_main_groups, join_small, silhouette


def blocks(*sizes, inside=0.6, across=0.0):
    """Return cosines of groups of these sizes, and the groups' labels."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    similarity = np.where(labels[:, None] == labels[None, :], inside, across)
    np.fill_diagonal(similarity, 1.0)
    return similarity, labels


def updates_of(sizes, *, seed=0, noise=1.0, length=400):
    """Return updates (n, d) of groups with directions of their own."""
    rng = np.random.default_rng(seed)
    rows = [direction + noise * rng.standard_normal((n, length)) for n, direction in _directions(rng, sizes, length)]
    return np.concatenate(rows).astype(np.float32), np.repeat(np.arange(len(sizes)), sizes)


def _directions(rng, sizes, length):
    return [(n, rng.standard_normal(length)) for n in sizes]


@pytest.mark.parametrize("sizes", [(5, 5), (5, 5, 5, 5), (14, 4, 2), (10, 9, 1), (3,) * 6])
def test_groups_of_any_sizes_are_found(sizes):
    similarity, labels = blocks(*sizes)
    found = find_main_groups(similarity, most=32, least=3, floor=0.25)
    assert (found.labels.tolist(), found.sizes) == (labels.tolist(), list(sizes))


def test_two_like_groups_are_told_apart():
    """Two groups that are alike beside the others are told apart."""
    similarity, labels = blocks(6, 6, 6, 6, inside=0.6, across=-0.2)
    similarity[:6, 6:12] = similarity[6:12, :6] = 0.25
    assert sorted(find_groups(similarity, most=12).sizes) == [6, 6, 12]
    assert find_main_groups(similarity, most=12, least=3, floor=0.25).labels.tolist() == labels.tolist()


def test_odd_devices_are_no_groups():
    """Odd devices beside a single group are no groups."""
    similarity, _ = blocks(18, 1, 1)
    assert find_main_groups(similarity, most=12, least=3, floor=0.25).sizes == [20]


def test_device_alone_in_its_group_has_none():
    similarity, labels = blocks(2, 1, inside=0.8)
    assert silhouette(1 - similarity, labels) == pytest.approx(0.8 * 2 / 3)


@given(st.integers(0, 10_000), st.integers(5, 12), st.integers(2, 4))
@settings(deadline=None)
def test_silhouettes_are_scikit_learns(seed, count, groups):
    """Silhouettes are those of scikit learn."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(groups), rng.integers(groups, size=count - groups)])
    points = rng.standard_normal((count, 3))
    distances = np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2))
    assert silhouette(distances, labels) == pytest.approx(silhouette_score(distances, labels, metric="precomputed"))


@given(st.integers(0, 10_000), st.permutations(range(12)))
@settings(deadline=None)
def test_names_of_devices_change_no_group(seed, order):
    """Other names of the devices change no group."""
    rows, _ = updates_of((6, 4, 2), seed=seed, noise=1.5)
    similarity = cosine_matrix(rows)
    plain = find_groups(similarity, most=6)
    moved = find_groups(similarity[np.ix_(order, order)], most=6)
    assert moved.silhouette == pytest.approx(plain.silhouette)
    same = plain.labels[:, None] == plain.labels[None, :]
    assert np.array_equal(same[np.ix_(order, order)], moved.labels[:, None] == moved.labels[None, :])


def test_noise_has_a_low_silhouette():
    """Updates that only differ by noise have a low silhouette."""
    for seed in range(5):
        rows, _ = updates_of((20,), seed=seed)
        assert find_groups(cosine_matrix(rows), most=32).silhouette < 0.25


def test_equal_updates_are_one_group():
    """Equal updates and few devices are one group."""
    assert find_groups(np.ones((5, 5)), most=3).sizes == [5]
    assert find_groups(np.eye(2), most=3).sizes == [2]
    assert find_groups(np.eye(1), most=3).sizes == [1]


def test_no_more_groups_are_tried_than_asked():
    similarity, _ = blocks(4, 4, 4, 4)
    assert len(find_groups(similarity, most=2).sizes) == 2
    with pytest.raises(NumericsError, match="at most 1 groups"):
        find_groups(similarity, most=1)
    with pytest.raises(NumericsError, match="not symmetric"):
        find_groups(np.array([[1, 0.5, 0], [0.2, 1, 0], [0, 0, 1]]), most=2)


def test_odd_device_hides_no_others():
    """One odd device does not hide the groups of the others."""
    similarity, labels = blocks(10, 10, inside=0.6, across=0.45)
    odd = np.full((21, 21), -0.2)
    odd[:20, :20], odd[20, 20] = similarity, 1.0
    assert sorted(find_groups(odd, most=10).sizes) == [1, 20]
    assert find_main_groups(odd, most=10, least=3, floor=0.25).labels.tolist() == [*labels.tolist(), 2]
    assert find_main_groups(odd, most=10, least=3, floor=0.5).sizes == [21]


def test_small_groups_join_nearest_direction():
    similarity, labels = blocks(5, 4, 2, 1)
    similarity[9:11, 5:9] = similarity[5:9, 9:11] = 0.3  # the pair is nearest to the group of four
    similarity[11, :5] = similarity[:5, 11] = 0.1
    assert np.bincount(join_small(similarity, labels, 3)).tolist() == [6, 6]
    assert np.bincount(join_small(similarity, labels, 2)).tolist() == [6, 4, 2]
    assert join_small(similarity, labels, 1).tolist() == labels.tolist()
    assert set(join_small(similarity, labels, 30)) == {0}


def test_too_small_groups_join_each_other():
    """Groups that are all too small join each other."""
    similarity, labels = blocks(2, 2, 2, 2)
    similarity[:2, 2:4] = similarity[2:4, :2] = similarity[4:6, 6:] = similarity[6:, 4:6] = 0.3
    assert np.bincount(join_small(similarity, labels, 4)).tolist() == [4, 4]
