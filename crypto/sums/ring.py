"""Fixed-point numbers modulo 2^32 or 2^16 and their pads: see the package."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from shoal.errors import IntegrityError

if TYPE_CHECKING:
    from shoal.protocol.documents import RunPlan
    from shoal.types import Float32Vector

Words = NDArray[np.uint32]
"""Numbers modulo 2^32, shape (d,): fixed-point numbers, padded or not, or their sums."""
SEED_BYTES: Final = 32
WORD_BYTES: Final = 4
LARGEST_SUM: Final = (1 << 31) - 1
"""Largest sum of fixed-point numbers of 32 bits, either sign."""
SHORT_BITS: Final = 16
"""Bits of a fixed-point number of `short`."""
SPREAD: Final = 8.0
"""Largest coordinate of a rotated update, in root mean squares: a normal one is longer once in 10^15 times."""
_BLOCK: Final = 1 << 15
"""Words that are padded at a time."""


def largest_of(most: int, bits: int = 32) -> int:
    """Return the largest fixed-point number of ``bits`` bits, either sign, of which ``most`` can be added up."""
    return (LARGEST_SUM >> (32 - bits)) // most


def unit_of(norm_limit: float, length: int, most: int, bits: int = 32) -> float:
    """Return the step of the fixed-point numbers, as small as a sum of ``most`` updates allows.

    Args:
        norm_limit: largest l2 norm of an update.
        length: its coordinates d.
        most: most updates in a sum.
        bits: of a number, 32 or `SHORT_BITS`.
    """
    return norm_limit * min(1.0, SPREAD / math.sqrt(length)) / largest_of(most, bits)


def fixed(update: Float32Vector, unit: float, most: int) -> Words:
    """Return a masked update as fixed-point numbers, (d,) uint32.

    Args:
        update: (d,) float32.
        unit: the step, of `unit_of`.
        most: most updates in a sum.

    Raises:
        IntegrityError: a coordinate is not finite, or too large for a sum of ``most``.
    """
    largest = largest_of(most)
    words = np.empty(len(update), np.uint32)
    for at in range(0, len(update), _BLOCK):
        steps = np.divide(update[at : at + _BLOCK], unit, dtype=np.float64)
        np.rint(steps, out=steps)
        if not -largest <= steps.min() <= steps.max() <= largest:
            raise IntegrityError(
                "a coordinate of the update is too large to be added up",
                hint="a smaller learning rate or --local clip shortens updates; or have the owner raise --norm-limit",
            )
        words[at : at + _BLOCK] = steps.astype(np.int32).view(np.uint32)
    return words


def short(update: Float32Vector, unit: float, most: int) -> Words:
    """Return a masked update as fixed-point numbers of `SHORT_BITS` bits with their sign extended, (d,) uint32.

    An update with a coordinate that is too large is scaled down as a whole. One whose root mean square is below one step is
    scaled up to it, so that no choice of the step leaves the sum to longer updates.

    Args:
        update: (d,) float32.
        unit: the step that is announced for the round.
        most: most updates in a sum.

    Raises:
        IntegrityError: a coordinate is not finite.
    """
    rms, peak = float(np.linalg.norm(update)) / math.sqrt(len(update)), float(max(update.max(), -update.min()))
    if not rms < math.inf:
        raise IntegrityError("the update holds NaN or infinities", hint="local training diverged: lower the step size")
    factor = min(1 / min(unit, rms), largest_of(most, SHORT_BITS) / peak) if rms else 0.0
    words: Words = np.rint(np.multiply(update, factor, dtype=np.float64)).astype(np.int32).view(np.uint32)
    return words


def step_in(plan: RunPlan, announced: float) -> float:
    """Return the step of a round's numbers: the ``announced`` one, and without it that of 32 bits, which the plan fixes."""
    return announced or unit_of(plan.recipe.norm_limit, plan.length, plan.most_summed)


def numbers_in(plan: RunPlan, announced: float, update: Float32Vector) -> Words:
    """Return a masked update (d,) float32 as numbers of a round: `short` with an ``announced`` step, else `fixed`."""
    return (short if announced else fixed)(update, step_in(plan, announced), plan.most_summed)


def extended(total: Words) -> Words:
    """Return a sum modulo 2^16, in the low halves of ``total`` (d,) uint32, with its sign extended to 32 bits."""
    words: Words = total.astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32)
    return words


def hidden(update: Float32Vector, unit: float, most: int, seeds: Iterable[bytes]) -> Words:
    """Return the `fixed` numbers of an update with a pad for each seed, 32 random bytes that no other update has had."""
    words = fixed(update, unit, most)
    for seed in seeds:
        add_pad(words, seed)
    return words


def add_pad(words: Words, seed: bytes, part: int = 0) -> None:
    """Add the pad of a seed to ``words`` (d,), in place: the ChaCha20 keystream (RFC 7539) as little-endian numbers.

    Args:
        words: (d,) uint32.
        seed: 32 random bytes.
        part: the nonce; the keystreams of a seed's parts have nothing in common.
    """
    stream = Cipher(algorithms.ChaCha20(seed, bytes(8) + part.to_bytes(8, "little")), mode=None).encryptor()
    zeros = bytes(WORD_BYTES * min(_BLOCK, len(words)))
    for at in range(0, len(words), _BLOCK):
        block = words[at : at + _BLOCK]
        block += np.frombuffer(stream.update(zeros[: WORD_BYTES * len(block)]), "<u4")


def average(total: Words, count: int, unit: float) -> Float32Vector:
    """Return the mean of ``count`` updates from the sum of their fixed-point numbers, (d,) float32: the same bits everywhere."""
    mean: Float32Vector = (total.view(np.int32) * (np.float64(unit) / count)).astype(np.float32)
    return mean


def mean_of(total: Words, count: int, unit: float, norm_limit: float) -> Float32Vector:
    """Return the mean of ``count`` updates from the sum of their fixed-point numbers, (d,) float32.

    Raises:
        IntegrityError: it is longer than ``norm_limit``, so the sum is not that of such updates: a pad was wrong.
    """
    mean = average(total, count, unit)
    norm = float(np.linalg.norm(mean))
    if norm > norm_limit * (1 + unit):
        raise IntegrityError(
            f"the sum of {count} updates has a mean of norm {norm:.3g}, above the limit {norm_limit:.3g}"
        )
    return mean
