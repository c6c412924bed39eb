"""Key streams, and the permutations and signs derived from them: equal on every platform and numpy version."""

from __future__ import annotations

from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_CHUNK_BYTES: Final = 1 << 20
_INDEX_STEP: Final = 1 << 20


def keystream(key: bytes, count: int) -> NDArray[np.uint8]:
    """Return ``count`` bytes of the AES-256-CTR keystream of ``key``.

    Args:
        key: 32 bytes, used for this stream only, since the counter starts at zero.
        count: number of bytes.

    Returns:
        shape (count,), uint8.
    """
    # A zero counter is safe because each key encrypts one stream only; encrypting zeros yields the bare key stream.
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    out = np.empty(count, dtype=np.uint8)
    zeros = bytes(min(_CHUNK_BYTES, count))
    for start in range(0, count, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, count)
        out[start:stop] = np.frombuffer(encryptor.update(zeros[: stop - start]), dtype=np.uint8)
    return out


def words(key: bytes, count: int) -> NDArray[np.uint64]:
    """Return ``count`` words of the keystream of ``key``; see `keystream`.

    Returns:
        shape (count,), uint64; each is eight keystream bytes, little-endian.
    """
    return keystream(key, 8 * count).view("<u8").astype(np.uint64, copy=False)


def signs(key: bytes, length: int) -> NDArray[np.int8]:
    """Return ``length`` signs derived from ``key``.

    Bit i of the keystream, the lowest bit of a byte first, is the sign of coordinate i: a one is minus.

    Args:
        key: 32 bytes.
        length: coordinates, at least 1.

    Returns:
        shape (length,), int8, each 1 or -1.
    """
    bits = np.unpackbits(keystream(key, -(-length // 8)), count=length, bitorder="little").view(np.int8)
    bits *= -2
    bits += 1
    return bits


def permutation(key: bytes, length: int) -> NDArray[np.int64]:
    """Return a permutation of ``range(length)`` derived from ``key``.

    Word i of the keystream gets i in its low bits, the words are sorted, and the low bits read in that order are the
    permutation. The words are distinct, so any correct sort gives the same answer. Random bits that tie leave the
    two indices in ascending order: with 64 - 20 random bits at a million coordinates, 0.03 such pairs are expected.

    Args:
        key: 32 bytes.
        length: coordinates, at least 1.

    Returns:
        shape (length,), int64.
    """
    packed = words(key, length)
    low_bits = np.uint64((1 << (length - 1).bit_length()) - 1)
    packed &= ~low_bits
    for start in range(0, length, _INDEX_STEP):
        stop = min(start + _INDEX_STEP, length)
        packed[start:stop] |= np.arange(start, stop, dtype=np.uint64)
    packed.sort()
    packed &= low_bits
    return packed.view(np.int64)
