"""The options by which a device reads its files of samples: what the task can't know about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal.errors import ConfigError

_QUOTES_AND_ENDS: Final = '"\r\n\0'


@dataclass(frozen=True, slots=True)
class Reading:
    """How a device reads its files.

    Attributes:
        label: name of the label column of tables; empty for the task's.
        separator: of CSV files, one character; empty to find it. It may be given as ``tab``.
    """

    label: str = ""
    separator: str = ""

    def __post_init__(self) -> None:
        if self.separator == "tab":
            object.__setattr__(self, "separator", "\t")
        if len(self.separator) > 1 or (self.separator and self.separator in _QUOTES_AND_ENDS):
            raise ConfigError(
                f"the separator is one character or tab, not {self.separator!r}", hint="leave it out to find it"
            )


AS_FOUND: Final = Reading()
"""The label column and the separator are found in each file."""
