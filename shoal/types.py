"""Value types without secrets that devices and aggregator share: mask segments, masked vectors and names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from shoal import limits
from shoal.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Array:
    """Annotation of a type hint: an array of one dtype, for `shoal.util.state_codec`."""

    dtype: str


if TYPE_CHECKING:
    Float32Vector = NDArray[np.float32]
else:
    # Enrolment and status read these types and must not pay for importing numpy.
    Float32Vector = Annotated[Any, Array("float32")]

KEY_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive coordinates of a vector that are masked by themselves.

    Attributes:
        name: ``cluster`` (one copy per cluster) or ``shared`` (one copy for all clusters).
        length: number of coordinates, at least 1.
    """

    name: str
    length: int

    def __post_init__(self) -> None:
        if self.name not in ("cluster", "shared"):
            raise ConfigError(f"segment name {self.name!r} is not known", hint="use 'cluster' or 'shared'")
        if not 1 <= self.length <= limits.MAX_COORDINATES:
            raise ConfigError(f"segment {self.name!r} has length {self.length}")


@dataclass(frozen=True, slots=True)
class MaskedVector:
    """A vector under the fleet's mask, the only form in which the aggregator holds vectors.

    Attributes:
        values: shape (d,), float32, little-endian, C-contiguous.
        key_id: 16 bytes that name the mask; vectors with different ids must not be added or compared.
    """

    values: Float32Vector
    key_id: bytes


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it can stand in a topic and a file name.

    Raises:
        ConfigError: it is empty, too long, or holds anything but a-z, 0-9 and '-'.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{what} {name[:80]!r} is not a valid name",
            hint=f"use 1 to {limits.MAX_NAME_CHARS} of a-z, 0-9 and '-', not beginning with '-'",
        )
    return name
