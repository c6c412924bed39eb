"""Key derivation for the mask: one HKDF-SHA256, one unambiguous encoding of what a key is for."""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES: Final = 32
SALT: Final = b"shoal-mask/v2"
"""Separates the mask's keys from any other use of HKDF and names the version of the derivation."""


def encode(*fields: bytes) -> bytes:
    """Return ``fields`` as one string, each behind its length in 4 big-endian bytes: no two lists encode alike."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def expand(secret: bytes, length: int, *fields: bytes) -> bytes:
    """Return ``length`` bytes of HKDF-SHA256 (RFC 5869) over ``secret``, bound to ``fields``.

    Args:
        secret: 32 bytes.
        length: bytes wanted.
        fields: what the key is for, in order.
    """
    return HKDF(algorithm=SHA256(), length=length, salt=SALT, info=encode(*fields)).derive(secret)
