"""Key streams, and the permutations and signs that are read from them."""

from __future__ import annotations

import numpy as np
import pytest

from crypto.mask.stream import Signs, keystream, permutation

KEY = bytes(range(32))


def signs(length: int) -> np.ndarray:
    ones = np.ones(length, np.float32)
    Signs(KEY, length).flip(ones, ones)
    return ones


def test_bytes_do_not_depend_on_the_number() -> None:
    """A longer stream starts with the shorter one, also across the 1 MiB pieces it is made in."""
    np.testing.assert_array_equal(keystream(KEY, 2_400_000)[:8000], keystream(KEY, 8000))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 140_000])
def test_signs_are_the_keystreams_bits(length: int) -> None:
    """Signs are the bits of the keystream lowest first."""
    bits = f"{int.from_bytes(keystream(KEY, 17_500).tobytes(), 'little'):0140000b}"[::-1]
    assert signs(length).tolist() == [-1 if bit == "1" else 1 for bit in bits[:length]]


def test_first_positions_are_uniform() -> None:
    """Over 4000 keys each of 8 indices comes first about 500 times (chi-square below the 1e-6 quantile of 7 dof)."""
    counts = np.bincount([permutation(i.to_bytes(32, "big"), 8)[0] for i in range(4000)], minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 43


@pytest.mark.parametrize("length", [1, 2, 1000, 600_000])
def test_permutation_by_two_digits(length: int) -> None:
    """Low digits come first in the stream, then high ones; equal numbers stay in ascending order."""
    digits = keystream(KEY, 4 * length).view("<u2").tolist()
    numbers = [high << 16 | low for low, high in zip(digits[:length], digits[length:], strict=True)]
    assert permutation(KEY, length).tolist() == sorted(range(length), key=lambda i: (numbers[i], i))
