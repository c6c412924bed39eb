"""Key derivation for the mask: HKDF-SHA256 with an unambiguous encoding of a key's purpose."""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES: Final = 32
SALT: Final = b"shoal-mask/v3"
"""Separates the mask's keys from any other use of HKDF and names the version of the derivation."""


def encode(*fields: bytes) -> bytes:
    """Concatenate ``fields``, each preceded by its length in 4 big-endian bytes, so that no two lists encode alike."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def expand(secret: bytes, length: int, *fields: bytes) -> bytes:
    """Return ``length`` bytes of HKDF-SHA256 (RFC 5869) over ``secret``, bound to ``fields``.

    Args:
        secret: 32 bytes.
        length: number of bytes.
        fields: the key's purpose and context, in order.
    """
    return HKDF(algorithm=SHA256(), length=length, salt=SALT, info=encode(*fields)).derive(secret)
