"""Data sets are found in each folder of the search, read exactly, and refused with a clear error if damaged or missing."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from shoal_lab.experiments.data import datasets

from shoal.errors import DataError, UsageError
from tests.helpers.datafiles import cifar, digits, idx


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """No data set of this machine is in the way."""
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_images_are_those_of_the_files(tmp_path, packed):
    x_train, y_train, x_test, y_test = digits(tmp_path / "d", packed=packed)
    made = datasets.load("mnist", tmp_path / "d")
    assert np.array_equal(made.x_train, x_train.astype(np.float32) / np.float32(255))
    assert np.array_equal(made.x_test, x_test.astype(np.float32) / np.float32(255))
    assert np.array_equal(made.y_train, y_train)
    assert np.array_equal(made.y_test, y_test)
    assert (made.x_train.dtype, made.y_train.dtype) == (np.float32, np.int64)


def test_the_places_in_their_order(tmp_path, monkeypatch):
    """--data-dir, $SHOAL_DATA_DIR, the cache, ./data: the first that has every file."""
    sizes = {}
    for size, place in ((50, "given/mnist"), (40, "set"), (30, "cache/shoal/mnist"), (20, "data/mnist")):
        digits(tmp_path / place, train=size)
        sizes[place] = size
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "set"))
    assert len(datasets.load("mnist", tmp_path / "given").x_train) == 50
    assert len(datasets.load("mnist").x_train) == 40
    (tmp_path / "set" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert len(datasets.load("mnist").x_train) == 30
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert len(datasets.load("mnist").x_train) == 20


def test_absent_data_says_what_where_and_how(tmp_path):
    """Exit code 8, the file, the places, the way to get it."""
    with pytest.raises(datasets.MissingDataError) as caught:
        datasets.load("mnist", tmp_path / "given")
    assert caught.value.exit_code == 8
    for part in (
        "train-images-idx3-ubyte is missing",
        str(tmp_path / "given"),
        str(tmp_path / "cache/shoal/mnist"),
        "data/mnist",
    ):
        assert part in str(caught.value)
    assert "shoal data fetch mnist" in caught.value.hint
    digits(tmp_path / "d")
    (tmp_path / "d" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(datasets.MissingDataError, match=r"d/t10k-labels-idx1-ubyte is missing"):
        datasets.load("mnist", tmp_path / "d")


def test_mnist_is_not_fashion_mnist(tmp_path, monkeypatch):
    """Both have the same file names; only the official training labels tell them apart."""
    import hashlib

    digits(tmp_path / "d")
    labels = gzip.decompress((tmp_path / "d/train-labels-idx1-ubyte.gz").read_bytes())
    monkeypatch.setitem(datasets.TRAIN_LABELS_SHA256, hashlib.sha256(labels).hexdigest(), "mnist")
    assert datasets.is_here("mnist", tmp_path / "d")
    assert datasets.folder_of("fashion-mnist", tmp_path / "d") != tmp_path / "d"


@pytest.mark.parametrize(
    ("name", "make", "file", "cut", "message"),
    [
        ("mnist", digits, "train-images-idx3-ubyte.gz", 20, r"train-images-idx3-ubyte.gz can.t be read"),
        ("cifar10", cifar, "data_batch_3.bin", 1, r"data_batch_3.bin has 6145 bytes, no multiple of 3073"),
    ],
)
def test_a_cut_file_is_refused(tmp_path, name, make, file, cut, message):
    make(tmp_path / "d")
    path = tmp_path / "d" / file
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=message):
        datasets.load(name, tmp_path / "d")


def test_labels_must_fit_the_images(tmp_path):
    digits(tmp_path / "d", packed=False)
    labels = tmp_path / "d/train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(59, np.uint8)))
    with pytest.raises(DataError, match="60 images, but its label file has 59 labels"):
        datasets.load("mnist", tmp_path / "d")
    labels.write_bytes(idx(np.full(60, 11, np.uint8)))
    with pytest.raises(DataError, match="label 11, not one of 10 classes"):
        datasets.load("mnist", tmp_path / "d")
    (tmp_path / "d/train-images-idx3-ubyte").write_bytes(idx(np.zeros((60, 16), np.uint8)))
    with pytest.raises(DataError, match=r"array of shape \(60, 16\)"):
        datasets.load("mnist", tmp_path / "d")


@pytest.mark.parametrize("inside", [".", "cifar-10-batches-bin"])
def test_cifar_is_read_red_green_blue(tmp_path, inside):
    """A row is a label, then the three planes; five batches train, one tests."""
    labels, pixels = cifar(tmp_path / "c" / inside)
    made = datasets.load("cifar10", tmp_path / "c")
    assert made.x_train.shape == (10, 3, 32, 32)
    assert made.x_test.shape == (2, 3, 32, 32)
    assert np.array_equal(made.y_train[:2], labels)
    assert made.x_train[1, 2, 0, 5] == np.float32(pixels[1, 2048 + 5]) / np.float32(255)


def test_unknown_data_sets_are_refused():
    with pytest.raises(UsageError, match="no data set 'imagenet'"):
        datasets.locate("imagenet")
    with pytest.raises(UsageError, match="no data set of images 'sent140'"):
        datasets.load("sent140")
