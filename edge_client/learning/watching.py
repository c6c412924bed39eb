"""Data files that grow: whether they have changed since they were read, within a bound on their size.

A device that watches its data looks at names, sizes and times of the files when a round's job is made, and reads them
again in the job if they differ. It looks at no content, so a watch costs a few system calls a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_client.learning.data import files_of
from edge_client.learning.image_folders import images_of
from shoal.errors import DataError

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
