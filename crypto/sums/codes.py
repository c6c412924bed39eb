"""A linear code of updates, with which devices know an opened sum from any other vector.

A device adds up random multiples of its fixed-point numbers q, and a constant of the model that it trained from, modulo a prime:

    code(q, model) = sum of r_j q_j + c_model            mod p

All devices of a round know the r_j and c; no server does. Codes add up as updates do, so the sum of a cell of n devices has
the code: sum of r_j (sum of q)_j + n c_model. Each code travels under a one-time pad (`check_pads`), and the keeper opens sums of
them with the sums of their updates. Who changes a sum, scales it by a fraction, or claims another number of devices, has to guess
its codes: one guess in 2^62 is right. Sums of one round can be added up, each with its number of devices. So a server without a
device can hand out means of unions of opened cells, weighed by whole numbers, and nothing else.

The codes are modulo a prime: in a ring modulo 2^32 an error of 2^31 in one number would pass by half of the multiples.

Example: the sum of two updates has the sum of their codes, and another vector does not.

    >>> import numpy as np
    >>> from crypto.sums.codes import added, code, matches
    >>> key, words = b"k" * 32, [np.array([1, 2, 3], np.int32), np.array([-5, 0, 7], np.int32)]
    >>> told = added([code(w, key, {0: 1}) for w in words])
    >>> matches(words[0] + words[1], key, {0: 2}, told), matches(words[0] * 2, key, {0: 2}, told)
    (True, False)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.sums.ring import Words, add_pad

PRIME: Final = (1 << 31) - 1
CHECKS: Final = 2
"""Codes of a vector, each with multiples of its own."""
_BLOCK: Final = 1 << 14
"""Numbers that are added up before they are reduced: a sum of products of 31 and 16 bits, with a sign, fits 63 bits."""
_PAD_PART: Final = 2
"""Part of a pad's seed that hides the codes; 0 and 1 hide the update and its sketch."""

Codes = tuple[int, ...]
"""`CHECKS` numbers modulo `PRIME`."""


def code(values: NDArray[np.int32], key: bytes, counts: Mapping[int, int]) -> Codes:
    """Return the codes of fixed-point numbers, or of a sum of them.

    Args:
        values: (d,) int32.
        key: 32 bytes that only devices know, of one round and one part of the vector.
        counts: model -> number of updates of devices that trained from it.
    """
    rows = [_numbers(key, check, len(values)) for check in range(CHECKS)]
    constants = [_numbers(key, CHECKS + check, 1 + max(counts)) for check in range(CHECKS)]
    totals = [sum(int(known[model]) * count for model, count in counts.items()) for known in constants]
    short = values.min(initial=0) >= -(1 << 15) and values.max(initial=0) < 1 << 15
    for at in range(0, len(values), _BLOCK):
        block = values[at : at + _BLOCK].astype(np.int64)
        halves = [(block, 0)] if short else [(block & 0xFFFF, 0), (block >> 16, 16)]
        for check, row in enumerate(rows):
            part = row[at : at + _BLOCK].astype(np.int64)
            totals[check] += sum(int(np.dot(part, half)) << shift for half, shift in halves)
    return tuple(total % PRIME for total in totals)


def matches(values: NDArray[np.int32], key: bytes, counts: Mapping[int, int], told: Codes) -> bool:
    """Return whether a sum has these codes; arguments as for `code`."""
    return code(values, key, counts) == tuple(told)


def added(codes: Iterable[Codes]) -> Codes:
    """Return the sum of codes, or of pads on them."""
    return tuple(sum(column) % PRIME for column in zip(*codes, strict=True))


def check_pads(seed: bytes, count: int) -> Codes:
    """Return the pads on ``count`` codes of the update whose pad has this seed."""
    return tuple(_numbers(seed, _PAD_PART, count).tolist())


def hidden_codes(codes: Codes, seed: bytes) -> Codes:
    """Return the codes under their pads."""
    return added([codes, check_pads(seed, len(codes))])


def opened_codes(words: Codes, pads: Codes) -> Codes:
    """Return a sum of codes from the sum of padded ones and that of their pads."""
    return tuple((word - pad) % PRIME for word, pad in zip(words, pads, strict=True))


def _numbers(key: bytes, part: int, count: int) -> Words:
    """Return numbers of 31 bits from a keystream, (count,) uint32."""
    numbers = np.zeros(count, np.uint32)
    add_pad(numbers, key, part)
    numbers &= np.uint32(PRIME)
    return numbers
