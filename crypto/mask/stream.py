"""Key streams, and the permutations and signs derived from them: equal on every platform and numpy version."""

from __future__ import annotations

from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_CHUNK_BYTES: Final = 1 << 20


def keystream(key: bytes, count: int) -> NDArray[np.uint8]:
    """Return ``count`` bytes of the AES-256-CTR keystream of ``key``.

    Args:
        key: 32 bytes, used for this stream only, since the counter starts at zero.
        count: number of bytes.

    Returns:
        shape (count,), uint8; read-only if it is short.
    """
    # A zero counter is safe because each key encrypts one stream only; encrypting zeros yields the bare key stream.
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    if count <= _CHUNK_BYTES:
        return np.frombuffer(encryptor.update(bytes(count)), dtype=np.uint8)
    out = np.empty(count, dtype=np.uint8)
    zeros = bytes(min(_CHUNK_BYTES, count))
    for start in range(0, count, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, count)
        out[start:stop] = np.frombuffer(encryptor.update(zeros[: stop - start]), dtype=np.uint8)
    return out


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

    The keystream gives every coordinate a low and a high digit of 16 bits: first the low digits of all, then the high ones.
    The permutation lists the coordinates in the order of their 32-bit numbers; equal numbers stay in ascending order. Of a
    million coordinates 116 pairs are expected to have equal numbers.

    Args:
        key: 32 bytes.
        length: coordinates, at least 1.

    Returns:
        shape (length,), int64.
    """
    digits = keystream(key, 4 * length).view("<u2").reshape(2, length)
    # numpy sorts 16-bit integers by radix: as fast on processors without vector instructions (ADR 25). The first order is
    # stored in 32 bits while the second is made, so that the peak stays at 18 bytes a coordinate, and 8 that numpy takes.
    order = np.argsort(digits[0], kind="stable")
    high = digits[1].take(order)
    by_low = order.astype(np.int32)
    del digits, order
    return by_low.take(np.argsort(high, kind="stable")).astype(np.int64)
