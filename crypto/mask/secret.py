"""The mask secret: 32 bytes from which a mask is derived. The aggregator must never receive them."""

from __future__ import annotations

import hmac
import os
from typing import NoReturn

from crypto.mask.kdf import SECRET_BYTES
from shoal.errors import IntegrityError


class MaskSecret:
    """Thirty-two secret bytes that only ``reveal`` returns.

    They are never part of a repr, a string, an error or a pickle. Comparison takes constant time; not hashable.
    """

    __slots__ = ("_value",)
    _value: bytes

    def __init__(self, value: bytes) -> None:
        if len(value) != SECRET_BYTES:
            raise IntegrityError(
                f"a mask secret has {SECRET_BYTES} bytes, not {len(value)}",
                hint="what it was read from is damaged, or is not a mask secret",
            )
        object.__setattr__(self, "_value", bytes(value))  # __setattr__ below refuses every assignment

    @classmethod
    def generate(cls) -> MaskSecret:
        """Return a fresh secret from the operating system's random source."""
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def from_bytes(cls, value: bytes) -> MaskSecret:
        """Return the secret that ``value`` holds.

        Raises:
            IntegrityError: ``value`` is not 32 bytes long.
        """
        return cls(value)

    def reveal(self) -> bytes:
        """Return the 32 raw bytes, for a derivation or for a file of mode 0600."""
        return self._value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskSecret):
            return NotImplemented
        return hmac.compare_digest(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]  # a hash of the secret would leave the object

    def __repr__(self) -> str:
        return "MaskSecret(<redacted>)"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a mask secret can't be changed")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a mask secret can't be pickled or copied; pass the object, or use reveal() on purpose")
