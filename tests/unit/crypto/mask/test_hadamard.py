"""The blocked Hadamard transform against matrices written out, at every kind of length."""

from __future__ import annotations

import numpy as np
import pytest

from crypto.mask.hadamard import transform


def sylvester(size: int) -> np.ndarray:
    """H[a, b] = -1 to the number of ones in a & b, over the root of ``size``."""
    ones = np.array([[(a & b).bit_count() for b in range(size)] for a in range(size)])
    return (-1.0) ** ones / np.sqrt(size)


def transformed(vector: np.ndarray) -> np.ndarray:
    out = vector.astype(np.float32)
    transform(out)
    return out


@pytest.mark.parametrize("length", [1, 2, 4, 7, 16, 33, 100])
def test_transform_equals_documented_matrix(length: int) -> None:
    """Column blocks of the first coordinates, then one block over the last ones if there is a remainder."""
    size = 1 << (length.bit_length() - 1)
    count = length // size
    expected = np.eye(length)
    first = np.kron(sylvester(size), np.eye(count))
    expected[: size * count] = first @ expected[: size * count]
    if size * count < length:
        expected[-size:] = sylvester(size) @ expected[-size:]
    got = np.stack([transformed(row) for row in np.eye(length)], axis=1)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("length", [300, 4097, 159_010])
def test_the_order_of_additions_is_fixed(length: int) -> None:
    """The same bits as butterflies done one stage at a time over whole float32 vectors: no cache size, no library."""
    vector = np.random.default_rng(length).standard_normal(length, dtype=np.float32)
    bits = min(length.bit_length() - 1, 12)
    whole = length >> bits << bits
    expected = vector.copy()
    for start, stop in [(0, whole), (length - (1 << bits), length)]:
        expected[start:stop] = plain(expected[start:stop], bits)
    assert transformed(vector).tobytes() == expected.tobytes()


def plain(vector: np.ndarray, bits: int) -> np.ndarray:
    """Six stages, the scale, the other stages: each stage on the whole vector."""
    half = vector.size >> bits
    for stage in range(bits):
        if stage == 6:
            vector = vector * np.float32(0.5 ** (bits / 2))
        pairs = vector.reshape(-1, 2, half)
        vector = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        half *= 2
    return vector if bits > 6 else vector * np.float32(0.5 ** (bits / 2))
