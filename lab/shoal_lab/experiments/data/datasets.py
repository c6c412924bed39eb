"""Find data sets on this machine, and load MNIST, Fashion-MNIST and CIFAR-10.

A data set is searched in the subfolder of its name in ``--data-dir``, then in ``--data-dir`` itself, then likewise under
$SHOAL_DATA_DIR, then in ~/.cache/shoal/<name>, ./data/<name> and the folder of the system's package.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_client.learning.data_files import read_idx
from shoal.errors import DataError
from shoal_lab.experiments.common.experiment import one_of

IDX_FILES: Final = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR_FILES: Final = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR_SHAPE: Final = (3, 32, 32)
CIFAR_ROW_BYTES: Final = 1 + math.prod(CIFAR_SHAPE)
CLASSES: Final = 10
_PIXEL_MAX: Final = np.float32(255.0)

TRAIN_LABELS_SHA256: Final = {
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5": "mnist",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9": "fashion-mnist",
}
"""SHA-256 of the unpacked training labels, to tell the two sets apart, whose files have the same names."""


class MissingDataError(DataError):
    """A data set was not found on this machine; the hint says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Images with labels, as published.

    Attributes:
        name: the data set's name.
        x_train: shape (n, 28, 28) or (n, 3, 32, 32), float32 in [0, 1]; x_test: the same.
        y_train: shape (n,), int64 below 10; y_test: the same.
    """

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one data set, and how to get them.

    Attributes:
        files: names, relative to its folder; each may also be NAME.gz, and a name ending in "/*.json" is a folder of files.
        inside: subfolders that the set's archive may have put the files in.
        obtain: instructions for people, with {folder} for the folder of the files.
        system: folders in which a package of the system installs it.
    """

    files: tuple[str, ...]
    obtain: str
    inside: tuple[str, ...] = (".",)
    system: tuple[Path, ...] = ()


SOURCES: Final = {
    "mnist": Source(IDX_FILES, "shoal data fetch mnist"),
    "fashion-mnist": Source(
        IDX_FILES,
        "apt-get install dataset-fashion-mnist, or put the four files of github.com/zalandoresearch/fashion-mnist in {folder}",
        system=(Path("/usr/share/datasets/fashion-mnist"),),
    ),
    "cifar10": Source(
        CIFAR_FILES,
        "unpack cifar-10-binary.tar.gz (the binary version, www.cs.toronto.edu/~kriz/cifar.html) in {folder}",
        inside=(".", "cifar-10-batches-bin"),
    ),
    "femnist": Source(
        ("train/*.json", "test/*.json"),
        "run LEAF's data/femnist/preprocess.sh (github.com/TalwalkarLab/leaf) and put its data/train and data/test in {folder}",
        inside=(".", "data"),
    ),
    "sent140": Source(
        ("train/*.json", "test/*.json"),
        "run LEAF's data/sent140/preprocess.sh (github.com/TalwalkarLab/leaf) and put its data/train and data/test in {folder}",
        inside=(".", "data"),
    ),
    "ag-news": Source(
        ("train.csv", "test.csv"),
        "put train.csv and test.csv of the AG-News topic classification set (class, title, description) in {folder}",
        inside=(".", "ag_news_csv"),
    ),
    "cmapss": Source(
        ("cmapss.npz",),
        "write NASA's turbofan runs (C-MAPSS) to {folder}/cmapss.npz, by numpy.savez: x (cycles, 24), the settings and "
        "sensors, and rul, unit and subset (cycles,)",
    ),
    "air": Source(
        ("air.npz",),
        "write the Beijing multi-site air-quality data (archive.ics.uci.edu, 501) to {folder}/air.npz, by numpy.savez: x (12 "
        "stations, hours, 11 figures with PM2.5 first) and stations (12,), their names",
    ),
}


def names() -> tuple[str, ...]:
    """Return the names of the data sets that are read from files."""
    return tuple(SOURCES)


def cache_dir() -> Path:
    """Return the folder of fetched data sets: $XDG_CACHE_HOME/shoal, by default ~/.cache/shoal."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


def places(name: str, data_dir: Path | None = None) -> list[Path]:
    """Return the folders that are searched for data set ``name``, in this order."""
    chosen = [data_dir] if data_dir else []
    if os.environ.get("SHOAL_DATA_DIR"):
        chosen.append(Path(os.environ["SHOAL_DATA_DIR"]))
    found = [place for folder in chosen for place in (folder / name, folder)]
    found += [cache_dir() / name, Path("data") / name, *source(name).system]
    return list(dict.fromkeys(found))


def source(name: str) -> Source:
    """Return the description of data set ``name``.

    Raises:
        UsageError: there is no such set.
    """
    return SOURCES[one_of("data set", name, SOURCES)]


def obtain(name: str, data_dir: Path | None = None) -> str:
    """Return instructions to get data set ``name``, with the first folder that is searched.

    Raises:
        UsageError: there is no such set.
    """
    return source(name).obtain.format(folder=places(name, data_dir)[0])


def locate(name: str, data_dir: Path | None = None) -> dict[str, list[Path]]:
    """Return the paths of data set ``name``, by the file's name in its `Source`, from the first folder that has all files.

    Raises:
        MissingDataError: no folder has them all; names a missing file, the searched folders, and how to get the set.
    """
    where = source(name)
    nearest: tuple[int, str] = (len(where.files), where.files[0])
    searched = places(name, data_dir)
    for folder in (place / inside for place in searched for inside in where.inside):
        found = {file: _paths(folder, file) for file in where.files}
        missing = [file for file, paths in found.items() if not paths]
        if not missing and not _is_another(name, found):
            return found
        # The error names the folder that lacks the fewest files, which is most likely the intended one.
        if missing and len(missing) < nearest[0]:
            nearest = len(missing), f"{folder / missing[0]}"
    raise MissingDataError(
        f"data set {name} is not here: {nearest[1]} is missing (looked in {', '.join(map(str, searched))})",
        hint=f"{obtain(name, data_dir)}; any of the folders above will do, or name another with --data-dir",
    )


def is_here(name: str, data_dir: Path | None = None) -> bool:
    """Return whether every file of data set ``name`` is found."""
    return folder_of(name, data_dir) is not None


def folder_of(name: str, data_dir: Path | None = None) -> Path | None:
    """Return the folder of data set ``name``, or None if it is not found."""
    try:
        found = locate(name, data_dir)
    except MissingDataError:
        return None
    first = source(name).files[0]
    return found[first][0].parents[first.count("/")]


def _paths(folder: Path, file: str) -> list[Path]:
    if file.endswith("/*.json"):
        return sorted((folder / file).parent.glob("*.json"))
    return [path for path in (folder / file, folder / f"{file}.gz") if path.is_file()][:1]


def _is_another(name: str, found: dict[str, list[Path]]) -> bool:
    """Return whether IDX files are those of another known data set with the same file names."""
    with contextlib.suppress(DataError):  # the reader reports a damaged file
        if labels := found.get("train-labels-idx1-ubyte"):
            return TRAIN_LABELS_SHA256.get(hashlib.sha256(read_bytes(labels[0])).hexdigest(), name) != name
    return False


def read_bytes(path: Path) -> bytes:
    """Return the bytes of ``path``, decompressed if its name ends in .gz.

    Raises:
        DataError: the file can't be read, or is truncated.
    """
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.name.endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read: {error}", hint="get the file again") from None


def load(name: str, data_dir: Path | None = None) -> Dataset:
    """Return the images of ``mnist``, ``fashion-mnist`` or ``cifar10``.

    Raises:
        MissingDataError: its files were not found.
        DataError: a file is damaged.
        UsageError: ``name`` is another data set.
    """
    return _READERS[one_of("data set of images", name, _READERS)](name, locate(name, data_dir))


def _read_idx_set(name: str, found: dict[str, list[Path]]) -> Dataset:
    parts = []
    for images in (found[IDX_FILES[0]][0], found[IDX_FILES[2]][0]):
        raw = read_idx(images)
        x, y = raw.x, raw.y.astype(np.int64)
        if x.ndim != 3:
            raise DataError(f"{images} holds no images, but an array of shape {x.shape}")
        if len(x) != len(y):
            raise DataError(f"{images} has {len(x)} images, but its label file has {len(y)} labels")
        _check_labels(images, y)
        parts += [x, y]
    return Dataset(name=name, x_train=parts[0], y_train=parts[1], x_test=parts[2], y_test=parts[3])


def _read_cifar(name: str, found: dict[str, list[Path]]) -> Dataset:
    x, y = zip(*(_cifar_batch(found[file][0]) for file in CIFAR_FILES), strict=True)
    return Dataset(
        name=name, x_train=np.concatenate(x[:-1]), y_train=np.concatenate(y[:-1]), x_test=x[-1], y_test=y[-1]
    )


def _cifar_batch(path: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    data = read_bytes(path)
    if not data or len(data) % CIFAR_ROW_BYTES:
        raise DataError(
            f"{path} has {len(data)} bytes, no multiple of {CIFAR_ROW_BYTES}",
            hint="it is cut off, or not the binary version",
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, CIFAR_ROW_BYTES)
    y = rows[:, 0].astype(np.int64)
    _check_labels(path, y)
    return rows[:, 1:].reshape(-1, *CIFAR_SHAPE).astype(np.float32) / _PIXEL_MAX, y


def _check_labels(path: Path, y: NDArray[np.int64]) -> None:
    if len(y) == 0:
        raise DataError(f"{path} holds no sample")
    if y.max() >= CLASSES:
        raise DataError(f"{path} has label {int(y.max())}, not one of {CLASSES} classes")


_READERS: Final[dict[str, Callable[[str, dict[str, list[Path]]], Dataset]]] = {
    "mnist": _read_idx_set,
    "fashion-mnist": _read_idx_set,
    "cifar10": _read_cifar,
}
