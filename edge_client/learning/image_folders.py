"""Reader of images in folders, one folder for each class: ``cats/1.png``, ``dogs/7.jpg``.

A folder's name is a label of the task, or the number of a class. Images must have the size that the task takes once they are
turned upright as their EXIF data say, and are converted to grey or colour; pixels of 8 or 16 bits are scaled to [0, 1]. Pillow
reads them: it is optional, and only the formats below are opened.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.data_files import PIXEL_MAX, Raw
from edge_client.learning.reading import STRICT, Damage
from edge_client.learning.tables import MAX_TABLE_VALUES
from shoal.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoal.task.manifest import TaskManifest

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm")
_FORMATS: Final = ("PNG", "JPEG", "BMP", "PPM")
_MODES: Final = {1: "L", 3: "RGB"}
_ERRORS: Final = (
    OSError,
    ValueError,
    SyntaxError,  # a chunk of a PNG that is damaged
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
)
_EXIF_ORIENTATION: Final = 0x0112
_DEEP_MAX: Final = np.float32(65535.0)
"""White of 16 bits."""
MAX_IMAGES: Final = 1 << 20
"""Most images of one folder."""


def holds_data(path: Path, source: Path) -> bool:
    """Return whether a path in ``source`` is a file that is neither empty nor hidden, as those are that other systems add."""
    hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
    return not hidden and path.is_file() and path.stat().st_size > 0


def images_of(source: Path) -> Sequence[Path]:
    """Return the images of a folder and of its sub-folders, by name, without opening them.

    Raises:
        DataError: there are more than MAX_IMAGES.
    """
    found: list[Path] = []
    for pattern in ("*", "*/*"):
        for path in source.glob(pattern):
            if path.suffix.lower() in SUFFIXES and holds_data(path, source):
                found.append(path)
            if len(found) > MAX_IMAGES:
                raise DataError(f"{source} has more than {MAX_IMAGES} images", hint="give the device a part of them")
    return sorted(found)


def read_images(source: Path, manifest: TaskManifest, *, labelled: bool = True, damage: Damage = STRICT) -> Raw:
    """Read the images of a folder; ``damage`` counts those that are no samples.

    Returns:
        x (n, *input shape) float32 in [0, 1], y (n,) the class of each image's folder; y is empty if not ``labelled``.

    Raises:
        DataError: Pillow is not installed, the task takes no images, or an image is damaged, of another size or of no class.
    """
    image = _pillow(source)
    channels, height, width = _size(source, manifest)
    paths = images_of(source)
    if len(paths) * channels * height * width > MAX_TABLE_VALUES:
        raise DataError(
            f"{source} has more than {MAX_TABLE_VALUES} values in its images", hint="give the device a part of them"
        )
    x = np.empty((len(paths), channels, height, width), np.float32)
    rows: list[str] = []
    labels: list[int] = []
    for path in paths:
        try:
            label = _class(path, source, manifest) if labelled else None
            x[len(rows)] = _pixels(image, path, (channels, height, width))
        except DataError as error:
            damage.add(error)
            continue
        rows.append(str(path))
        labels += [] if label is None else [label]
    others = {path.suffix for path in source.glob("*/*") if holds_data(path, source)}
    unused = tuple(sorted(suffix for suffix in others if suffix.lower() not in SUFFIXES))
    shaped = x[: len(rows)].reshape(-1, *manifest.input.shape)
    return Raw(shaped, np.array(labels), source, unused=unused, rows=tuple(rows))


def _pillow(source: Path) -> Any:
    from importlib import import_module

    try:
        return import_module("PIL.Image")
    except ImportError:
        raise DataError(
            f"{source} holds images, and Pillow is not installed",
            hint="pip install 'shoal[images]', or save the images as an .npz with x and y",
        ) from None


def _size(source: Path, manifest: TaskManifest) -> tuple[int, int, int]:
    """Return channels, height and width of the task's images."""
    shape = manifest.input.shape
    size = (1, *shape) if len(shape) == 2 else shape
    if len(size) != 3 or size[0] not in _MODES or manifest.input.dtype != "float32":
        raise DataError(
            f"{source} holds images, and the task takes samples of shape {shape}",
            hint="a task for images takes (channels, height, width) with 1 or 3 channels, such as the built-in cnn",
        )
    return size[0], size[1], size[2]


def _class(path: Path, source: Path, manifest: TaskManifest) -> int:
    name = path.parent.name
    if path.parent == source:
        raise DataError(f"{path} is in no folder of a class", hint="one folder for each class, named after its label")
    if manifest.data.labels:
        found = manifest.data.class_of(name)
    else:
        found = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else None
    if found is None:
        known = (
            ", ".join(manifest.data.labels)[:200] or "numbers, since the task names no labels (task compile --labels)"
        )
        raise DataError(f"{path.parent}: {name!r} is no label of the task", hint=f"labels: {known}")
    return found


def _opened(image: Any, path: Path) -> Any:
    # The size is checked before anything is decoded, so a warning of a large one is noise.
    warnings.simplefilter("ignore", image.DecompressionBombWarning)
    return image.open(path, formats=_FORMATS)


def _pixels(image: Any, path: Path, size: tuple[int, int, int]) -> NDArray[np.float32]:
    channels, height, width = size
    try:
        with warnings.catch_warnings(), _opened(image, path) as file:
            # Before it is decoded, which its EXIF data may need: a small file may have pixels for gigabytes.
            _check_pixels(path, file.size, (width, height), (height, width))
            upright = _upright(file)
            _check_pixels(path, upright.size, (width, height))
            values = _levels(upright, _MODES[channels], path)
    except (*_ERRORS, image.DecompressionBombError) as error:
        raise DataError(f"{path} can't be read as an image: {str(error)[:200]}") from None
    return np.broadcast_to(values.reshape(height, width, -1), (height, width, channels)).transpose(2, 0, 1)


def _check_pixels(path: Path, found: tuple[int, int], wanted: tuple[int, int], *also: tuple[int, int]) -> None:
    if found not in (wanted, *also):
        raise DataError(
            f"{path} has {found[0]} x {found[1]} pixels, the task takes {wanted[0]} x {wanted[1]}",
            hint="scale the images before: they are read as they are",
        )


def _upright(file: Any) -> Any:
    """Return an image turned as its EXIF data say."""
    from importlib import import_module

    turned = file.getexif().get(_EXIF_ORIENTATION, 1) != 1
    return import_module("PIL.ImageOps").exif_transpose(file) if turned else file


def _levels(file: Any, mode: str, path: Path) -> NDArray[np.float32]:
    """Return the pixels in [0, 1], (height, width) or (height, width, channels), float32; grey ones of 16 bits stay grey."""
    if not file.mode.startswith("I"):
        return np.asarray(file.convert(mode), np.float32) / PIXEL_MAX
    values = np.asarray(file, np.float32)
    if not (values >= 0).all() or not (values <= _DEEP_MAX).all():
        raise DataError(f"{path} has pixels of more than 16 bits", hint="save them with 8 or 16 bits")
    return values / _DEEP_MAX
