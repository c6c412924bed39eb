"""A look: the cosines of a few updates for the keeper, of which neither it nor the aggregator sees one.

A device sends, beside its padded update, a padded *sketch* of it: `SKETCH` coordinates of the rotated update, which are random
directions of the clear one, brought to one length. The aggregator has the words A = S + P of the sketches S, and the keeper the
pads P. The owner, who sees neither, has dealt both sides random numbers for one product of shares (Beaver, 1991):

    owner        U, Z to the aggregator (as a seed), T and Z' = U T' - Z to the keeper
    aggregator   A - U                                            hides A
    keeper       P - T                                            hides P
    aggregator   M = A A' - (A (P - T)' + Z) - (...)'             hides all but the sum
    keeper       M - ((A - U) T' + Z') - (...)' + P P'  =  S S'

All numbers are modulo 2^32, and ' transposes. The keeper learns the cosines S S', the aggregator nothing: what it gets is the
keeper's answer, groups. A deal is used once; with one used twice, differences of sketches would show.

Example: two devices with opposite updates.

    >>> import numpy as np
    >>> from crypto.sums.deals import cosines, deal, sketch_pads
    >>> from crypto.sums.looks import hidden_sketch
    >>> updates = [np.array([3, 4, 0], np.float32), np.array([-3, -4, 0], np.float32)]
    >>> seeds = [bytes([n]) * 32 for n in (1, 2)]
    >>> words = np.stack([hidden_sketch(u, s) for u, s in zip(updates, seeds)])
    >>> pads = sketch_pads(seeds)
    >>> ours, theirs = deal(b"a" * 32, b"k" * 32, index=0)
    >>> told, answer = ours.masked(words), theirs.masked(pads)
    >>> cosines(theirs, pads, told, ours.product(words, answer)).round(3).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.sums.looks import LENGTH, SKETCH, SKETCH_PART
from crypto.sums.ring import Words, add_pad
from shoal.limits import MOST_LOOKED


def sketch_pads(seeds: Sequence[bytes]) -> Words:
    """Return the pads on sketches, (n, SKETCH) uint32."""
    pads = np.zeros((len(seeds), SKETCH), np.uint32)
    for row, seed in zip(pads, seeds, strict=True):
        add_pad(row, seed, SKETCH_PART)
    return pads


@dataclass(frozen=True, slots=True)
class Deal:
    """One side's random numbers for one look.

    Attributes:
        mask: U or T, (MOST_LOOKED, SKETCH) uint32.
        share: Z or Z', (MOST_LOOKED, MOST_LOOKED) uint32.
    """

    mask: Words = field(repr=False)
    share: Words = field(repr=False)

    def masked(self, words: Words) -> Words:
        """Return the side's words (n, SKETCH) less its mask."""
        return words - self.mask[: len(words)]

    def product(self, words: Words, pads: Words) -> Words:
        """Return the aggregator's part M of the products, (n, n), from its words and the keeper's masked pads, (n, SKETCH)."""
        n = len(words)
        return words @ words.T - _both(words @ pads.T + self.share[:n, :n])


def deal(aggregator: bytes, keeper: bytes, *, index: int) -> tuple[Deal, Deal]:
    """Return both sides' numbers for look ``index`` of a run, from the seed of each, 32 bytes."""
    ours, mask = aggregator_deal(aggregator, index), _mask_of(keeper, index)
    return ours, Deal(mask, ours.mask @ mask.T - ours.share)


def aggregator_deal(seed: bytes, index: int) -> Deal:
    """Return the aggregator's numbers for look ``index``; both follow from its seed."""
    share = np.zeros(MOST_LOOKED * MOST_LOOKED, np.uint32)
    add_pad(share, seed, 2 * index + 1)
    return Deal(_mask_of(seed, index), share.reshape(MOST_LOOKED, MOST_LOOKED))


def keeper_deal(seed: bytes, index: int, share: bytes) -> Deal:
    """Return the keeper's numbers for look ``index`` from its seed and the share that the owner has dealt."""
    return Deal(_mask_of(seed, index), np.frombuffer(share, "<u4").reshape(MOST_LOOKED, MOST_LOOKED))


def cosines(keeper: Deal, pads: Words, masked: Words, product: Words) -> NDArray[np.float64]:
    """Return the cosines of the sketches, (n, n) float64 within [-1, 1].

    A sketch that has not the length of one was made falsely: its row and its column are zero, also on the diagonal.

    Args:
        keeper: its numbers.
        pads: P, (n, SKETCH).
        masked: the aggregator's A - U, (n, SKETCH).
        product: its M, (n, n).
    """
    n = len(pads)
    total = product - _both(masked @ keeper.mask[:n].T + keeper.share[:n, :n]) + pads @ pads.T
    found = total.view(np.int32).astype(np.float64) / LENGTH**2
    true = np.abs(np.diagonal(found) - 1.0) < _TOLERANCE
    found *= true[:, None] & true[None, :]
    return np.clip((found + found.T) / 2, -1.0, 1.0)


_TOLERANCE: Final = 0.01
"""By how much the squared length of a true sketch may differ from 1, by rounding."""


def _both(matrix: Words) -> Words:
    return matrix + matrix.T


def _mask_of(seed: bytes, index: int) -> Words:
    mask = np.zeros(MOST_LOOKED * SKETCH, np.uint32)
    add_pad(mask, seed, 2 * index)
    return mask.reshape(MOST_LOOKED, SKETCH)
