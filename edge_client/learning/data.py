"""A device's samples: read from files, checked against the task's contract, split into three shares.

A device that watches its data looks at names, sizes and times of the files when a round's job is made, and reads them again in
the job if they differ. It looks at no content, so a watch costs a few system calls a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.data_files import Raw, read_idx, read_npz
from edge_client.learning.image_folders import SUFFIXES, holds_data, images_of, read_images
from edge_client.learning.reading import AS_FOUND, NONE_LEFT_OUT, STRICT, Damage, LeftOut, NoSampleError, Reading
from edge_client.learning.tables import TableSpec, class_numbers, read_csv, read_parquet
from shoal.digests import shake_256
from shoal.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoal.task.manifest import TaskManifest, TensorSpec

VALIDATION_PERCENT: Final = 20
"""Share of the samples for validation; the test share has the same size, and the rest is for training."""
MIN_SAMPLES: Final = 5
"""Fewest samples that give each of the three shares one."""

MOST_LOOKED_AT: Final = 1000
"""Files of a folder without data that are looked at for the message."""

_SPLIT_LABEL: Final = b"shoal/data-split/1"
_GROWING_LABEL: Final = b"shoal/data-split/growing/1"
_FLOAT32_EXACT: Final = 1 << 24
_ROW_HINT: Final = "fix or remove that row"
_TABLE_SUFFIXES: Final = (".csv", ".tsv", ".parquet")
_FORMATS_HINT: Final = (
    "give an .npz with x and y, a .csv or .parquet table, a folder of one of these, IDX files (train-images-idx3-ubyte), or a "
    "folder of images with one folder for each class"
)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples and labels of the same length.

    Attributes:
        x: shape (n, *input shape), the task's input dtype.
        y: shape (n, *label shape), the task's label dtype.
        left_out: the damaged samples that are not among them.
        unused: columns of tables that the task does not take, and endings of files in folders of images that are none.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    left_out: LeftOut = NONE_LEFT_OUT
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) == 0:
            raise DataError(f"a batch needs as many labels as samples, and one at least: {len(self.x)}, {len(self.y)}")

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, slots=True)
class DataSplits:
    """A device's samples in three disjoint shares: for training, for choosing between models, and for reported figures."""

    train: Dataset
    validation: Dataset
    test: Dataset


def load(source: Path, manifest: TaskManifest, reading: Reading = AS_FOUND) -> Dataset:
    """Return every sample of ``source`` in the task's shapes and dtypes; missing values are nan, if the task takes them.

    A few damaged samples are left out, see `Reading.skip_bad`.

    Raises:
        DataError: the source is missing, of no known format, or breaks the contract; file, row and column are named.
    """
    damage = Damage(strict=reading.skip_bad == 0)
    raws = _read(source, manifest, reading, damage, labelled=True)
    found = [batch for raw in raws if (batch := _conform(raw, manifest, damage)) is not None]
    left_out = damage.left_out(sum(map(len, found)), reading)
    if not found:
        raise DataError(f"{source} holds no sample")
    unused = tuple(dict.fromkeys(name for raw in raws for name in raw.unused))
    return replace(joined(*found), left_out=left_out, unused=unused)


def joined(*batches: Dataset) -> Dataset:
    """Return the samples of all batches, one batch after another; a copy unless there is only one."""
    if len(batches) == 1:
        return batches[0]
    return Dataset(np.concatenate([b.x for b in batches]), np.concatenate([b.y for b in batches]))


def load_inputs(source: Path, manifest: TaskManifest, reading: Reading = AS_FOUND) -> NDArray[Any]:
    """Return the samples of ``source`` alone, shape (n, *input shape): labels may be absent.

    In a CSV file without names the last column counts as a label only if there is one column more than the task takes.

    Raises:
        DataError: as for `load`.
    """
    raws = _read(source, manifest, reading, STRICT, labelled=False)
    if not raws:
        raise DataError(f"{source} holds no sample")
    return np.concatenate([_features(_Rows(raw, STRICT), manifest) for raw in raws])


def split(batch: Dataset, seed: bytes) -> DataSplits:
    """Split into 60/20/20 by a permutation that depends on ``seed`` and the number of samples alone.

    The permutation is the same on every platform and library version: SHAKE-256 words sorted, no numpy stream.

    Raises:
        DataError: fewer than MIN_SAMPLES samples.
    """
    n = len(batch)
    if n < MIN_SAMPLES:
        raise DataError(f"{n} samples are too few to split", hint=f"a device needs at least {MIN_SAMPLES}")
    validation = n * VALIDATION_PERCENT // 100
    train = n - 2 * validation
    order = permutation(n, seed)
    cuts = order[:train], order[train : train + validation], order[train + validation :]
    return DataSplits(*(Dataset(batch.x[rows], batch.y[rows]) for rows in cuts))


def split_growing(batch: Dataset, seed: bytes) -> DataSplits:
    """Split into 60/20/20 so that a sample stays in its share when more are appended.

    Of each MIN_SAMPLES samples in a row, one is for validation and one for the test, drawn by ``seed``. Samples
    after the last whole MIN_SAMPLES wait for the others.

    Raises:
        DataError: fewer than MIN_SAMPLES samples.
    """
    blocks = len(batch) // MIN_SAMPLES
    if not blocks:
        raise DataError(f"{len(batch)} samples are too few to split", hint=f"a device needs at least {MIN_SAMPLES}")
    stream = shake_256(_GROWING_LABEL + seed, 8 * blocks * MIN_SAMPLES)
    order = np.frombuffer(stream, "<u8").reshape(blocks, MIN_SAMPLES).argsort(axis=1, kind="stable")
    order += np.arange(blocks)[:, None] * MIN_SAMPLES
    parts = np.sort(order[:, 2:].ravel()), order[:, 0], order[:, 1]
    return DataSplits(*(Dataset(batch.x[rows], batch.y[rows]) for rows in parts))


def permutation(n: int, seed: bytes) -> NDArray[np.int64]:
    """Return a permutation of 0..n-1, shape (n,), int64.

    SHAKE-256(label, length-prefixed seed) gives n little-endian 64-bit words; the index replaces a word's low bits, so that
    all words differ and any sorting algorithm returns the same order, on any platform and library version.
    """
    stream = shake_256(_SPLIT_LABEL + len(seed).to_bytes(4, "little") + seed, 8 * n)
    words = np.frombuffer(stream, "<u8").astype(np.uint64)
    bits = np.uint64(max(n - 1, 1).bit_length())
    words = (words >> bits << bits) | np.arange(n, dtype=np.uint64)
    words.sort()
    return (words & np.uint64((1 << int(bits)) - 1)).astype(np.int64)


def files_of(source: Path) -> Sequence[Path]:
    """Return the files that hold the samples of ``source``, without opening them; a folder of images is one.

    Raises:
        DataError: there are none, or none of a known format.
    """
    try:
        if source.is_dir():
            return _files_in(source)
        if not source.exists():
            raise DataError(f"{source} does not exist", hint=_FORMATS_HINT)
    except OSError as error:
        raise DataError(f"{source} can't be read: {error.strerror}", hint="check its permissions") from error
    name = source.name.lower()
    if not (name.endswith((".npz", *_TABLE_SUFFIXES)) or "idx" in name):
        raise DataError(f"{source} is of no known format", hint=_FORMATS_HINT)
    return [source]


def _files_in(folder: Path) -> Sequence[Path]:
    for suffix in (".npz", *_TABLE_SUFFIXES):
        found = sorted(_those_with_data(folder, f"*{suffix}"), key=lambda path: path.name)
        if found:
            return found
    # A folder of IDX files may also hold a benchmark's test set: read only one file, train-* if there is one.
    found = sorted(
        _those_with_data(folder, "*images*idx*"), key=lambda path: (not path.name.startswith("train"), path.name)
    )
    if found:
        return found[:1]
    if images_of(folder):
        return [folder]
    found = [path for path in islice(folder.rglob("*"), MOST_LOOKED_AT) if holds_data(path, folder)]
    deep = next((path for path in found if path.suffix.lower() in SUFFIXES), None)
    if deep is not None:
        raise DataError(f"{folder} holds images a level too deep: {deep}", hint=f"give {deep.parent.parent}")
    kinds = ", ".join(sorted({path.suffix for path in found if path.suffix}))[:200] or "none"
    raise DataError(f"{folder} holds no data file of a known format; those in it: {kinds}", hint=_FORMATS_HINT)


def _those_with_data(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if holds_data(path, folder)]


def _read(source: Path, manifest: TaskManifest, reading: Reading, damage: Damage, *, labelled: bool) -> Sequence[Raw]:
    spec = TableSpec(
        width=manifest.width,
        data=manifest.data,
        label=reading.label,
        separator=reading.separator,
        decimal=reading.decimal,
        labelled=labelled,
        growing=reading.growing,
    )
    found = []
    for path in files_of(source):
        with suppress(NoSampleError):
            found.append(_read_file(path, manifest, spec, damage))
    return found


def _read_file(path: Path, manifest: TaskManifest, spec: TableSpec, damage: Damage) -> Raw:
    name = path.name.lower()
    if path.is_dir():
        return read_images(path, manifest, labelled=spec.labelled, damage=damage)
    if name.endswith(".npz"):
        return read_npz(path, labelled=spec.labelled)
    if name.endswith(".parquet"):
        return read_parquet(path, spec, damage)
    return read_csv(path, spec, damage) if name.endswith((".csv", ".tsv")) else read_idx(path)


class _Rows:
    """The samples of a file while they are brought into the task's form.

    Attributes:
        raw: the samples.
        bad: (n,) bool, the damaged ones, which are counted.
    """

    def __init__(self, raw: Raw, damage: Damage) -> None:
        self.raw, self._damage = raw, damage
        self.bad = np.zeros(len(raw.x), np.bool_) if raw.bad is None else raw.bad

    def require(self, good: NDArray[np.bool_], what: str, complaint: str, hint: str = _ROW_HINT) -> None:
        """Count each sample as damaged of which a value of ``good``, (n, width) bool, is false; the first one is named."""
        bad = ~good.all(axis=1) & ~self.bad
        if bad.any():
            row = int(np.argmax(bad))
            error = DataError(f"{self.raw.origin}, {self.raw.row_name(row)}: the {what} {complaint}", hint=hint)
            self._mark(bad, error)

    def require_present(self, missing: NDArray[np.bool_]) -> None:
        """Count each sample as damaged that lacks a value, by ``missing``, (n, width) bool; the first one is named."""
        missing = missing & ~self.bad[:, None]
        if missing.any():
            row, column = np.argwhere(missing)[0].tolist()
            error = DataError(
                f"{self.raw.origin}, {self.raw.row_name(row)}, {self.raw.column_name(column)}: the value is missing",
                hint="fill it in, remove the row, or let the task replace missing values: "
                "shoal-fleet task compile --missing mean",
            )
            self._mark(np.asarray(missing.any(axis=1)), error)

    def classes(self, labels: NDArray[np.str_], manifest: TaskManifest) -> NDArray[np.float64]:
        """Return the class of each label, (n,); those of no class are damaged."""
        found = class_numbers(labels.tolist(), manifest.data, f"{self.raw.origin}, y", self._damage)
        self.bad = self.bad | np.isnan(found)
        return found

    def _mark(self, bad: NDArray[np.bool_], error: DataError) -> None:
        self._damage.add(error, int(np.count_nonzero(bad)))
        self.bad = self.bad | bad


def _conform(raw: Raw, manifest: TaskManifest, damage: Damage) -> Dataset | None:
    """Return the whole samples of a file; None if it has none."""
    if len(raw.x) != len(raw.y):
        raise DataError(f"{raw.origin} has {len(raw.x)} samples but {len(raw.y)} labels")
    if len(raw.x) == 0:
        return None
    rows, y = _Rows(raw, damage), raw.y
    if y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8", "replace")
    if y.dtype.kind == "U" and manifest.data.labels and y.size == len(y):
        y = rows.classes(y.reshape(-1), manifest)
    x, y = _features(rows, manifest), _tensor(y, manifest.label, rows, "label")
    if not rows.bad.any():
        return Dataset(x, y)
    return None if rows.bad.all() else Dataset(x[~rows.bad], y[~rows.bad])


def _features(rows: _Rows, manifest: TaskManifest) -> NDArray[Any]:
    """Return the samples of a file in the task's form; a missing value is damage, or nan if the task takes it."""
    x = rows.raw.x
    if x.dtype.kind != "f" or x.size != len(x) * manifest.width:
        return _tensor(x, manifest.input, rows, "sample")
    missing = np.isnan(x).reshape(len(x), manifest.width)
    if not missing.any():
        return _tensor(x, manifest.input, rows, "sample")
    if manifest.data.missing != "mean":
        rows.require_present(missing)
    tensor = _tensor(np.where(np.isnan(x), 0.0, x), manifest.input, rows, "sample")
    tensor.reshape(len(x), manifest.width)[missing & ~rows.bad[:, None]] = np.nan
    return tensor


def _tensor(values: NDArray[Any], spec: TensorSpec, rows: _Rows, what: str) -> NDArray[Any]:
    """Convert ``values`` (n, ...) to (n, *spec.shape) of the contract's dtype; a row that does not fit is damage and zero."""
    n, width = len(values), math.prod(spec.shape)
    if values.dtype.kind not in "fiub":
        text = what == "label" and values.dtype.kind in "US"
        hint = "name the classes in the task: shoal-fleet task compile --labels NAME,NAME,..." if text else ""
        raise DataError(f"{rows.raw.origin}: each {what} must be numbers, not {values.dtype}", hint=hint)
    if values.size != n * width:
        raise DataError(
            f"{rows.raw.origin}: a {what} has shape {values.shape[1:]}, the task expects {spec.shape}",
            hint="check that this data belongs to this task",
        )
    flat = values.reshape(n, width)
    if values.dtype.kind == "f":
        rows.require(np.isfinite(flat), what, "is not finite")
    if spec.dtype == "float32":
        if values.dtype.kind == "f":
            if values.dtype.itemsize > 4:  # float64 may be out of range; float16 and float32 always fit
                rows.require(np.abs(flat) <= np.finfo(np.float32).max, what, "is too large for float32")
        elif values.dtype.itemsize > 2:  # 8 and 16 bits always fit the 24-bit mantissa
            exact = (flat <= _FLOAT32_EXACT) & (flat >= -_FLOAT32_EXACT)
            rows.require(exact, what, "is an integer that float32 can't hold exactly")
    else:
        if values.dtype.kind == "f":
            rows.require(flat == np.trunc(flat), what, "is not a whole number")
        limit = spec.limit or 1 << 62
        if what == "label" and flat.size and flat.min() >= 1 and flat.max() == limit:
            raise DataError(
                f"{rows.raw.origin}: the labels go up to {limit}, and the task's from 0 to {limit - 1}",
                hint="subtract 1 from all: they begin at 0",
            )
        rows.require((flat < limit) & (flat >= 0), what, f"is not in 0..{limit - 1}")
    if rows.bad.any():  # what can't be converted must not reach the conversion
        flat = np.where(rows.bad[:, None], flat.dtype.type(0), flat)
    return np.ascontiguousarray(flat.reshape(n, *spec.shape), dtype=spec.dtype)


MAX_WATCHED_BYTES: Final = 256 << 20
"""Most bytes of files that are read again: meanwhile the samples before and the new ones are both in memory."""

Watch = Callable[[], "FilesSeen"]
"""Returns the files as they are now."""


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """Name, size in bytes and time of modification, in nanoseconds, of each data file."""

    files: tuple[tuple[str, int, int], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self.files)

    def check_size(self) -> None:
        """Check that the files may be read again.

        Raises:
            DataError: they have more than MAX_WATCHED_BYTES.
        """
        if self.total_bytes > MAX_WATCHED_BYTES:
            raise DataError(
                f"the data have grown to {self.total_bytes} bytes, more than the {MAX_WATCHED_BYTES} that are read again",
                hint="move older samples away, or restart the device to read all of them once",
            )


def watch_of(source: Path) -> Watch:
    """Return a watch over the data files of a device."""

    def look() -> FilesSeen:
        """Return the files as they are now.

        Raises:
            DataError: there are none, or they can't be looked at.
        """
        paths = [each for path in files_of(source) for each in (images_of(path) if path.is_dir() else [path])]
        try:
            found = [(path, path.stat()) for path in paths]
        except OSError as error:
            raise DataError(f"{source} can't be read: {error.strerror}", hint="check its permissions") from error
        return FilesSeen(tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found))

    return look
