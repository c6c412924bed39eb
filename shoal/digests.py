"""SHA-256, HMAC-SHA-256 and SHAKE-256 by the library that also seals and signs.

hashlib has an OpenSSL of its own, which would take 4 MB of the memory of a device; both are equally fast.
"""

from __future__ import annotations

from cryptography.hazmat.primitives import hashes, hmac

_SHA256 = hashes.SHA256()


class Sha256:
    """A SHA-256 that grows piece by piece.

    Args:
        pieces: bytes to begin with.
    """

    def __init__(self, *pieces: bytes | memoryview) -> None:
        self._hash = hashes.Hash(_SHA256)
        self.update(*pieces)

    def update(self, *pieces: bytes | memoryview) -> None:
        """Add bytes."""
        for piece in pieces:
            self._hash.update(piece)

    def digest(self) -> bytes:
        """Return the digest of all bytes so far, 32 bytes; more may follow."""
        return self._hash.copy().finalize()


def sha256(*pieces: bytes | memoryview) -> bytes:
    """Return the SHA-256 of the pieces in a row, 32 bytes."""
    found = hashes.Hash(_SHA256)
    for piece in pieces:
        found.update(piece)
    return found.finalize()


def before_digest(data: bytes | memoryview) -> memoryview | None:
    """Return the bytes before the SHA-256 that ends ``data``; None if it is not theirs."""
    whole = memoryview(data)
    content = whole[: -_SHA256.digest_size]
    return content if sha256(content) == whole[-_SHA256.digest_size :] else None


def hmac_sha256(key: bytes, *pieces: bytes | memoryview) -> bytes:
    """Return the HMAC-SHA-256 (RFC 2104) of the pieces in a row, 32 bytes."""
    found = hmac.HMAC(key, _SHA256)
    for piece in pieces:
        found.update(piece)
    return found.finalize()


def shake_256(name: bytes, count: int) -> bytes:
    """Return the first ``count`` bytes of the SHAKE-256 of ``name``."""
    if count == 0:  # the library refuses it
        return b""
    found = hashes.Hash(hashes.SHAKE256(count))
    found.update(name)
    return found.finalize()
