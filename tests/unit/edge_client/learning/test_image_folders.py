"""Images in folders: classes by folder, sizes, formats, limits."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from edge_client.learning import image_folders
from edge_client.learning.data import files_of, load, load_inputs
from edge_client.learning.image_folders import images_of, read_images
from shoal.errors import DataError
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import TensorSpec
from tests.helpers.tasks import manifest

GREY = manifest(
    input=TensorSpec((1, 2, 3), "float32"),
    label=TensorSpec((), "int64", 2),
    data=DataDeclaration(labels=("cat", "dog")),
)
COLOUR = manifest(input=TensorSpec((3, 2, 3), "float32"), label=TensorSpec((), "int64", 12))


def write(path, values):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(np.asarray(values, np.uint8)).save(path)


def test_folder_is_a_class(tmp_path):
    """A folder is a class and pixels are scaled."""
    grey = np.arange(6).reshape(2, 3)
    write(tmp_path / "dog" / "1.png", grey)
    write(tmp_path / "cat" / "2.bmp", grey + 100)
    found = load(tmp_path, GREY)
    assert files_of(tmp_path) == [tmp_path]
    np.testing.assert_allclose(found.x[:, 0], np.stack([grey + 100, grey]) / 255, rtol=1e-6)
    assert (found.y.tolist(), found.x.dtype) == ([0, 1], np.float32)


def test_colour_and_numbered_folders(tmp_path):
    colour = np.arange(18).reshape(2, 3, 3)
    write(tmp_path / "11" / "a.png", colour)
    write(tmp_path / "2" / "b.png", colour[..., 0])
    raw = read_images(tmp_path, COLOUR)
    np.testing.assert_allclose(raw.x[0], colour.transpose(2, 0, 1) / 255, rtol=1e-6)
    np.testing.assert_allclose(raw.x[1], np.stack([colour[..., 0]] * 3) / 255, rtol=1e-6)
    assert raw.y.tolist() == [11, 2]


def deep(path, values, **options):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(np.asarray(values)).save(path, **options)


@pytest.mark.parametrize("suffix", [".png", ".pgm"])
@pytest.mark.parametrize("task", [GREY, COLOUR], ids=["grey", "colour"])
def test_pixels_of_16_bits_are_scaled(tmp_path, suffix, task):
    values = np.array([[0, 255, 256], [4095, 40000, 65535]], np.uint16)
    deep(tmp_path / f"a{suffix}", values)
    found = load_inputs(tmp_path, task)
    np.testing.assert_allclose(found[0], np.stack([values / 65535] * len(found[0])), rtol=1e-6)


def test_images_are_turned_as_exif_says(tmp_path):
    image = pytest.importorskip("PIL.Image")
    upright = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    for name, stored, orientation in (("a", upright, 1), ("b", np.rot90(upright), 6), ("c", np.rot90(upright, 2), 3)):
        exif = image.Exif()
        exif[0x0112] = orientation
        deep(tmp_path / f"{name}.png", stored, exif=exif)
    found = load_inputs(tmp_path, GREY)
    np.testing.assert_allclose(found[:, 0], np.stack([upright / np.float32(255)] * 3), rtol=1e-6)


def test_unlabelled_samples_need_no_folders(tmp_path):
    """Samples without labels need no folders."""
    write(tmp_path / "a.png", np.zeros((2, 3)))
    assert load_inputs(tmp_path, GREY).shape == (1, 1, 2, 3)
    with pytest.raises(DataError, match=r"a\.png is in no folder of a class"):
        load(tmp_path, GREY)


@pytest.mark.parametrize(
    ("name", "values", "task", "message"),
    [
        ("bird/a.png", np.zeros((2, 3)), GREY, "'bird' is no label of the task"),
        ("one/a.png", np.zeros((2, 3)), COLOUR, "'one' is no label of the task"),
        ("cat/a.png", np.zeros((3, 2)), GREY, "a.png has 2 x 3 pixels, the task takes 3 x 2"),
        ("0/a.png", np.zeros((2, 3)), manifest(), r"the task takes samples of shape \(4,\)"),
        ("12/a.png", np.zeros((2, 3)), COLOUR, "the labels go up to 12, and the task's from 0 to 11"),
    ],
)
def test_images_that_do_not_fit_are_named(tmp_path, name, values, task, message):
    write(tmp_path / name, values)
    with pytest.raises(DataError, match=message):
        load(tmp_path, task)


@pytest.mark.parametrize("data", [b"GIF89a", b"\x89PNG\r\n\x1a\n"])
def test_a_damaged_image_is_named(tmp_path, data):
    pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.png can't be read as an image"):
        load(tmp_path, GREY)


def test_pillow_may_be_absent(tmp_path, monkeypatch):
    write(tmp_path / "cat" / "a.png", np.zeros((2, 3)))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match="Pillow is not installed") as caught:
        load(tmp_path, GREY)
    assert "shoal[images]" in caught.value.hint


def test_images_and_their_values_are_limited(tmp_path, monkeypatch):
    for name in "ab":
        write(tmp_path / "cat" / f"{name}.png", np.zeros((2, 3)))
    monkeypatch.setattr(image_folders, "MAX_TABLE_VALUES", 11)
    with pytest.raises(DataError, match="more than 11 values"):
        load(tmp_path, GREY)
    monkeypatch.setattr(image_folders, "MAX_IMAGES", 1)
    with pytest.raises(DataError, match="more than 1 images"):
        images_of(tmp_path)
