"""Wire versions: the range that a program speaks, and the one version that the members of a run have in common.

A wire version fixes the messages of a run: their fields, their numbers, and how each party handles them. A run plan pins
one. A device's presence tells the range that its software speaks. Messages outside a run (roster, grants, presence, the owner's
requests) are the same in all wire versions, and change by later fields alone (`shoal.protocol.codec.LaterFields`).

Example: software that speaks 1 to 2 and software that speaks 2 to 3 have 2 in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.errors import WireError
from shoal.protocol.codec import U16, message


@message(129)
@dataclass(frozen=True, slots=True)
class WireRange:
    """The wire versions that a program speaks: ``least`` to ``most``, both included."""

    least: U16
    most: U16

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise WireError(f"wire versions from {self.least} to {self.most}")

    def __contains__(self, version: int) -> bool:
        return self.least <= version <= self.most

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


SPOKEN: Final = WireRange(1, 2)
"""The wire versions of this software."""
PLAIN: Final = 1
"""The version of runs whose aggregator is one process."""
SHARDED: Final = 2
"""The first version of runs whose uploads and means travel in parts, see `shoal.protocol.shards`."""
HIDING: Final = 2
"""The first version of runs that begin with a round of statistics behind a dense matrix, see `crypto.mask.dense`."""


def newest_common(ranges: Iterable[WireRange]) -> int | None:
    """Return the newest wire version that is in all ``ranges``; None if there is none.

    Args:
        ranges: at least one.
    """
    known = list(ranges)
    newest = min(spoken.most for spoken in known)
    return newest if newest >= max(spoken.least for spoken in known) else None
