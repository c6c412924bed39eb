"""Key streams, and the permutations and signs derived from them: equal on every platform and numpy version."""

from __future__ import annotations

from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from crypto.mask.kernel import installed

_CHUNK_BYTES: Final = 1 << 20
_STEP: Final = 1 << 17
"""Coordinates whose signs or places are worked out at a time."""
_SIGNS: Final = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(
    np.float32
)
"""The signs of the eight bits of each byte, shape (256, 8), float32."""
_GROUP: Final = 1 << 18
"""Coordinates of a group that is sorted at a time, about."""


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


class Signs:
    """A secret sign for each coordinate, one bit each.

    Bit i of the keystream, the lowest bit of a byte first, is the sign of coordinate i: a one is minus.

    Args:
        key: 32 bytes.
        length: coordinates, at least 1.
    """

    __slots__ = ("_bits", "_length")

    def __init__(self, key: bytes, length: int) -> None:
        self._bits, self._length = keystream(key, -(-length // 8)), length

    def flip(self, source: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Write ``source`` times the signs to ``out``, both shape (length,), float32; they may be one array."""
        for start in range(0, self._length, _STEP):
            part = slice(start, min(start + _STEP, self._length))
            bits = self._bits[start // 8 : -(-part.stop // 8)]
            signs = _SIGNS.take(bits, axis=0).reshape(-1)
            np.multiply(source[part], signs[: part.stop - start], out=out[part])

    def __repr__(self) -> str:
        return f"Signs(length={self._length}, bits=<redacted>)"


def permutation(key: bytes, length: int) -> NDArray[np.int32]:
    """Return a permutation of ``range(length)`` derived from ``key``.

    The keystream gives every coordinate a low and a high digit of 16 bits: first the low digits of all, then the high ones.
    The permutation lists the coordinates in the order of their 32-bit numbers; equal numbers stay in ascending order. Of a
    million coordinates 116 pairs are expected to have equal numbers.

    Args:
        key: 32 bytes.
        length: coordinates, at least 1.

    Returns:
        shape (length,), int32.
    """
    low, high = keystream(key, 4 * length).view("<u2").reshape(2, length)
    if length < 2 * _GROUP:
        return _sorted(low, high)
    # Groups are small enough to be sorted in the cache, and the peak stays at 10 bytes a coordinate.
    order = np.empty(length, np.int32)
    ends = _grouped(order, high, (length // _GROUP).bit_length())
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        group = order[start:stop]
        group[:] = group.take(_sorted(low.take(group), high.take(group)))
    return order


def _sorted(low: NDArray[np.uint16], high: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Return the places of some coordinates in the order of their numbers, all shape (n,)."""
    kernel = installed()
    return _by_radix(low, high) if kernel is None else kernel.sorted(low, high)


def _by_radix(low: NDArray[np.uint16], high: NDArray[np.uint16]) -> NDArray[np.int32]:
    # numpy sorts 16-bit integers by radix: as fast on processors without vector instructions (ADR 25).
    by_low = np.argsort(low, kind="stable")
    digits, order = high.take(by_low), by_low.astype(np.int32)
    del by_low  # before the next one is made
    return order.take(np.argsort(digits, kind="stable"))


def _grouped(order: NDArray[np.int32], high: NDArray[np.uint16], bits: int) -> list[int]:
    """Write all coordinates to ``order``, by the highest ``bits`` of their numbers; return where each group ends."""
    pieces = [slice(start, start + _STEP) for start in range(0, order.size, _STEP)]
    digits = [high[piece] >> (16 - bits) for piece in pieces]
    sizes = [np.bincount(digit, minlength=1 << bits) for digit in digits]
    ends = np.cumsum(np.sum(sizes, axis=0))
    place = ends - np.sum(sizes, axis=0)
    for piece, digit, size in zip(pieces, digits, sizes, strict=True):
        by_group = np.argsort(digit, kind="stable")
        order[np.repeat(place - np.cumsum(size) + size, size) + np.arange(digit.size)] = by_group + piece.start
        place += size
    return list(map(int, ends))
