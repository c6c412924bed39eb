"""The demo's hidden groups: of equal size, each with its own labels or its own orientation."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shoal.demo.data import Hidden, hide_groups, load_images
from shoal.errors import ShoalError, UsageError

SIDE, N = 3, 240


@pytest.fixture(scope="module")
def images():
    """(x (N, 9) whose first pixel names the sample, y (N,) with all ten classes)."""
    rng = np.random.default_rng(0)
    x = rng.random((N, SIDE * SIDE)).astype(np.float32)
    x[:, 4] = np.arange(N)
    return x, rng.permutation(np.arange(N) % 10).astype(np.int64)


def rows_of(hidden, device):
    """Return which samples a device got: the middle pixel, which no rotation moves, names each."""
    return hidden.x[device][:, 4].astype(int)


@pytest.mark.parametrize("skew", ["labels", "rotation"])
@pytest.mark.parametrize("devices", [8, 10, 20])
def test_groups_are_of_equal_size(images, skew, devices):
    """Groups are of equal size and every sample is dealt once."""
    hidden = hide_groups(*images, SIDE, devices=devices, skew=skew, seed=3)
    sizes = Counter(hidden.groups)
    assert set(sizes) == {0, 1, 2, 3}
    assert max(sizes.values()) - min(sizes.values()) <= 1
    dealt = np.concatenate([rows_of(hidden, i) for i in range(devices)])
    assert sorted(dealt) == list(range(N))
    counts = [len(y) for y in hidden.y]
    assert len(counts) == devices
    assert max(counts) - min(counts) <= 1


def test_labels_have_one_permutation_a_group(images):
    """CFL's incongruent conditionals: the images stay, and each group calls the classes its own way."""
    x, y = images
    hidden = hide_groups(x, y, SIDE, devices=8, skew="labels", seed=3)
    names = {}
    for i, group in enumerate(hidden.groups):
        rows = rows_of(hidden, i)
        assert np.array_equal(hidden.x[i], x[rows])
        assert hidden.y[i].dtype == np.int64
        for old, new in zip(y[rows], hidden.y[i], strict=True):
            assert names.setdefault((group, int(old)), int(new)) == new
    permutations = [tuple(names[g, c] for c in range(10)) for g in range(4)]
    assert all(sorted(p) == list(range(10)) for p in permutations)
    assert permutations[0] == tuple(range(10))
    assert len(set(permutations)) == 4


def test_images_are_turned_by_quarter_group(images):
    """IFCA's rotations: the labels stay, and group g sees everything turned by g times 90 degrees."""
    x, y = images
    hidden = hide_groups(x, y, SIDE, devices=8, skew="rotation", seed=3)
    for i, group in enumerate(hidden.groups):
        rows = rows_of(hidden, i)
        assert np.array_equal(hidden.y[i], y[rows])
        for row, turned in zip(rows, hidden.x[i], strict=True):
            assert np.array_equal(turned.reshape(SIDE, SIDE), np.rot90(x[row].reshape(SIDE, SIDE), group))


def test_the_seed_decides_everything(images):
    one, again, other = (hide_groups(*images, SIDE, devices=8, skew="labels", seed=s) for s in (3, 3, 4))
    assert one.groups == again.groups
    assert all(np.array_equal(a, b) for a, b in zip(one.x + one.y, again.x + again.y, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one.x, other.x, strict=True))


def test_what_is_saved_is_what_was_dealt(images, tmp_path):
    """A device's file has its own samples only, and not its group."""
    hidden = hide_groups(*images, SIDE, devices=8, skew="labels", seed=3)
    paths = hidden.save(tmp_path)
    assert len(set(paths)) == 8
    for path, x, y in zip(paths, hidden.x, hidden.y, strict=True):
        with np.load(path) as file:
            assert sorted(file) == ["x", "y"]
            assert np.array_equal(file["x"], x)
            assert np.array_equal(file["y"], y)


def test_the_digits_are_whole_and_in_range():
    x, y, side = load_images("digits", None)
    assert (x.shape, x.dtype, side) == ((1797, 64), np.float32, 8)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert set(y.tolist()) == set(range(10))
    assert isinstance(hide_groups(x, y, side, devices=20, skew="labels", seed=0), Hidden)


def test_what_is_not_there_is_said(images, tmp_path):
    """Who lacks mnist is told how it is fetched."""
    with pytest.raises(UsageError, match="no skew 'size'"):
        hide_groups(*images, SIDE, devices=8, skew="size", seed=0)
    with pytest.raises(UsageError, match="no data 'cifar'"):
        load_images("cifar", None)
    for folder, message in ((None, "MNIST needs its files"), (tmp_path, "holds no train-images")):
        with pytest.raises(ShoalError, match=message) as caught:
            load_images("mnist", folder)
        assert caught.value.hint == "shoal data fetch mnist --to DIR, then --data-dir DIR"
