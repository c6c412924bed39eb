"""Readers of NumPy archives and IDX files, and the form in which every reader returns its samples. No format can run code."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import numpy as np

from shoal.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_IDX_UBYTE: Final = 0x08
_IDX_MAX_RANK: Final = 4
PIXEL_MAX: Final = np.float32(255.0)
"""Grey level of white."""

MAX_IDX_BYTES: Final = 4 << 30
"""Largest IDX file, unpacked: bounds the memory that a damaged header can make us reserve."""

_NPZ_ERRORS: Final = (
    OSError,
    ValueError,  # a bad header, or a pickled object
    EOFError,
    SyntaxError,  # header text that is not a Python literal
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,  # an unknown compression method
    RuntimeError,  # an encrypted member
    MemoryError,  # a header with a larger shape than memory allows
    OverflowError,
)


@dataclass(frozen=True, slots=True)
class Raw:
    """Numbers as a file holds them, before the task's contract is applied.

    Attributes:
        x: shape (n, ...).
        y: shape (n, ...).
        origin: the file, for messages.
        lines: for text, the line number of each row; None for formats whose rows are numbered by position.
        columns: names of the features of a table, for messages.
        unused: names of a table's other columns, or endings of a folder's other files.
        rows: for samples with a file each, their paths.
        bad: (n,) bool, the samples that were found damaged when they were read; None for none.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    origin: Path
    lines: array[int] | None = None
    columns: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    bad: NDArray[np.bool_] | None = None

    def row_name(self, row: int) -> str:
        """Return the name of row ``row`` (0-based) for error messages: its line in a text file, its file, or its index."""
        if self.rows:
            return self.rows[row]
        return f"row {row}" if self.lines is None else f"line {self.lines[row]}"

    def column_name(self, column: int) -> str:
        """Return the name of a value's column (0-based) for error messages."""
        return f"column {self.columns[column]!r}" if column < len(self.columns) else f"value {column}"


def read_npz(path: Path, *, labelled: bool = True) -> Raw:
    """Read the arrays ``x`` and ``y`` of an .npz archive; refuse pickled objects. ``y`` is empty if not ``labelled``."""
    try:
        with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as archive:
            missing = ({"x", "y"} if labelled else {"x"}) - set(archive.files)
            if missing:
                raise DataError(
                    f"{path} has no array {min(missing)!r}", hint="save it with numpy.savez(path, x=..., y=...)"
                )
            x, y = archive["x"], archive["y"] if labelled else np.empty(0)
    except _NPZ_ERRORS as error:
        hint = "save text as numpy.array(values, dtype=str)" if "Object arrays" in str(error) else ""
        raise DataError(f"{path} can't be read as an .npz archive: {str(error)[:200]}", hint=hint) from None
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        raise DataError(f"{path} can't be read as an .npz archive: a member is no array")
    if x.ndim == 0 or y.ndim == 0:
        raise DataError(f"{path}: x and y must have a first dimension of samples")
    return Raw(x, y, path)


def read_idx(path: Path) -> Raw:
    """Read an IDX image file (``*images*idx3*``, gzipped or not) and the label file beside it; pixels are scaled to [0, 1]."""
    if "images" not in path.name:
        raise DataError(
            f"{path} is not an image file", hint="give the *-images-idx3-ubyte file; its labels are found beside it"
        )
    stem = path.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    labels = next((p for p in (path.with_name(stem), path.with_name(f"{stem}.gz")) if p.exists()), None)
    if labels is None:
        raise DataError(f"the labels of {path} are missing", hint=f"put {stem} (or {stem}.gz) beside it")
    x, y = _idx(path), _idx(labels)
    if y.ndim != 1:
        raise DataError(f"{labels} is not a label file")
    return Raw(x.astype(np.float32) / PIXEL_MAX, y, path)


def _idx(path: Path) -> NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes: 0, 0, type, rank, big-endian u32 sizes, data."""
    import gzip

    try:
        with path.open("rb") as plain:
            file = cast(BinaryIO, gzip.GzipFile(fileobj=plain)) if path.name.endswith(".gz") else plain
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _IDX_UBYTE or not 1 <= head[3] <= _IDX_MAX_RANK:
                raise DataError(f"{path} is not an IDX file of unsigned bytes")
            sizes = file.read(4 * head[3])
            shape = tuple(int.from_bytes(sizes[at : at + 4], "big") for at in range(0, len(sizes), 4))
            count = math.prod(shape)
            if count > MAX_IDX_BYTES:
                raise DataError(f"{path} promises {count} bytes, more than {MAX_IDX_BYTES}")
            data = file.read(count + 1)  # one byte more, to detect a file that is longer than its header says
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise DataError(f"{path} can't be read: {error}") from None
    if len(shape) != head[3] or len(data) != count:
        raise DataError(f"{path} does not hold the {count} bytes that its header promises")
    return np.frombuffer(data, np.uint8).reshape(shape)
