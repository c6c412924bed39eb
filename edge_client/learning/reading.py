"""The options by which a device reads its files of samples, and the damaged samples that it leaves out.

A sample is damaged if its line, image or row can't be read as one of the task: a line that a power loss has cut, an image that
can't be decoded, a label of no class, a value that is no number. A few are left out and counted. Which ones depends on the files
alone, so each start leaves out the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal.errors import ConfigError, DataError

LEAST_LEFT_OUT: Final = 3
"""Damaged samples that are left out of any source, however small, unless the operator says otherwise."""
MOST_LEFT_OUT_PERCENT: Final = 1
"""Share of all samples that may be damaged, unless the operator says otherwise."""

_QUOTES_AND_ENDS: Final = '"\r\n\0'


@dataclass(frozen=True, slots=True)
class Reading:
    """How a device reads its files.

    Attributes:
        label: name of the label column of tables; empty for the task's.
        separator: of CSV files, one character; empty to find it. It may be given as ``tab``.
        skip_bad: most damaged samples that are left out; None for LEAST_LEFT_OUT or MOST_LEFT_OUT_PERCENT, whichever is more, but
            fewer than the whole ones.
        decimal: decimal mark of CSV files, a point or a comma; empty to find it.
        growing: a last line of text without its end is still being written, and is no sample yet.
    """

    label: str = ""
    separator: str = ""
    skip_bad: int | None = None
    growing: bool = False
    decimal: str = ""

    def __post_init__(self) -> None:
        if self.separator == "tab":
            object.__setattr__(self, "separator", "\t")
        if len(self.separator) > 1 or (self.separator and self.separator in _QUOTES_AND_ENDS):
            raise ConfigError(
                f"the separator is one character or tab, not {self.separator!r}", hint="leave it out to find it"
            )
        if self.decimal not in ("", ".", ","):
            raise ConfigError(f"the decimal mark is . or , and not {self.decimal!r}", hint="leave it out to find it")
        if self.skip_bad is not None and self.skip_bad < 0:
            raise ConfigError(f"skip_bad is a number of samples, not {self.skip_bad}", hint="0 leaves none out")


AS_FOUND: Final = Reading()
"""The label column and the separator are found in each file, and a few damaged samples are left out."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The damaged samples that were left out of a source.

    Attributes:
        count: number of them.
        samples: number of all samples, with them.
        first: what is wrong with the first, and where.
    """

    count: int = 0
    samples: int = 0
    first: str = ""

    def __str__(self) -> str:
        return f"damaged samples left out: {self.count} of {self.samples}; the first: {self.first}"


NONE_LEFT_OUT: Final = LeftOut()


class NoSampleError(DataError):
    """A file holds no sample, but nothing is wrong with it: a table of which only the header has been written."""


class Damage:
    """Counts the damaged samples of a source while it is read; the first one of a strict source is an error."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._first: DataError | None = None
        self._count = 0

    def add(self, error: DataError, count: int = 1) -> None:
        """Count damaged samples.

        Raises:
            DataError: the source is strict.
        """
        if self._strict:
            raise error
        self._first = self._first or error
        self._count += count

    def left_out(self, kept: int, reading: Reading) -> LeftOut:
        """Return what was left out of a source of which ``kept`` samples are whole.

        Raises:
            DataError: the first one's error: more are damaged than may be left out, or all are.
        """
        first, count, total = self._first, self._count, kept + self._count
        if first is None:
            return NONE_LEFT_OUT
        most = reading.skip_bad
        if most is None:  # a few: never as many as are whole
            most = min(max(LEAST_LEFT_OUT, total * MOST_LEFT_OUT_PERCENT // 100), kept - 1)
        if kept and count <= most:
            return LeftOut(count, total, str(first))
        advice = [first.hint] if first.hint else []
        if kept >= count:
            advice.append(f"to leave out as many: SHOAL_EDGE_SKIP_BAD={count}, or skip_bad = {count} in --config FILE")
        raise DataError(f"{first} (damaged samples: {count} of {total})", hint="; ".join(advice))


STRICT: Final = Damage(strict=True)
"""No sample is left out."""
