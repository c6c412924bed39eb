"""Sketches under pads, and their cosines, which only the keeper learns."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.sums.deals import cosines, deal, keeper_deal, sketch_pads
from crypto.sums.looks import SKETCH, hidden_sketch, sketch
from shoal.limits import MOST_LOOKED

SEEDS = (b"a" * 32, b"k" * 32)
KNOWN = [4175501611, 454171002, 3711779745, "afe7ddddddc42bfd"]


def seeds_of(count):
    return [hashlib.sha256(bytes([at])).digest() for at in range(count)]


def look(updates, index=0, lie=None):
    """Return the cosines as the keeper gets them, and all that either side sends."""
    seeds = seeds_of(len(updates))
    words = np.stack([hidden_sketch(update, seed) for update, seed in zip(updates, seeds, strict=True)])
    if lie is not None:
        words[lie] += np.uint32(3000)
    pads, (ours, theirs) = sketch_pads(seeds), deal(*SEEDS, index=index)
    masked, answer = ours.masked(words), theirs.masked(pads)
    product = ours.product(words, answer)
    return cosines(theirs, pads, masked, product), (masked, answer, product)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, MOST_LOOKED), st.integers(1, 3000), st.integers(0, 50))
def test_cosines_are_those_of_sketches(seed, count, length, index):
    rng = np.random.default_rng(seed)
    updates = rng.normal(size=(count, length)).astype(np.float32) * rng.lognormal(0, 3, (count, 1)).astype(np.float32)
    found, _ = look(updates, index)
    rows = np.stack([sketch(u) for u in updates]).view(np.int32).astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    assert np.abs(found - rows @ rows.T).max() < 2e-3
    assert (found == found.T).all()


def test_sketch_keeps_cosines():
    rng = np.random.default_rng(0)
    found, _ = look((rng.normal(size=20_000) + rng.normal(size=(12, 20_000))).astype(np.float32))
    assert np.abs(found[np.triu_indices(12, 1)] - 0.5).max() < 4 / np.sqrt(SKETCH)


def test_false_sketch_is_unlike_all():
    found, _ = look(np.random.default_rng(2).normal(size=(4, 600)).astype(np.float32), lie=2)
    assert not found[2].any()
    assert not found[:, 2].any()
    assert np.diagonal(found)[[0, 1, 3]].all()


def test_messages_of_a_look_show_nothing():
    """What either side gets looks like random numbers, whatever the updates: equal ones differ in no bit of it on average."""
    for updates in (np.ones((8, 4096), np.float32), np.random.default_rng(3).normal(size=(8, 4096)).astype(np.float32)):
        _, sent = look(updates)
        for words in sent[:2]:
            bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8))
            assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))


def test_each_look_has_other_numbers():
    first, second = (deal(*SEEDS, index=index)[1] for index in (0, 1))
    assert (first.mask != second.mask).mean() > 0.99
    assert (first.share != second.share).mean() > 0.99


def test_known_numbers():
    """The wire format of deals: ChaCha20 of the seed with the nonces 2 i and 2 i + 1."""
    ours, theirs = deal(*SEEDS, index=3)
    assert [int(ours.mask[0, 0]), int(ours.share[0, 0]), int(theirs.mask[0, 0])] == KNOWN[:3]
    assert hashlib.sha256(theirs.share.astype("<u4").tobytes()).hexdigest()[:16] == KNOWN[3]
    again = keeper_deal(SEEDS[1], 3, theirs.share.astype("<u4").tobytes())
    assert (again.share == theirs.share).all()
    assert (again.mask == theirs.mask).all()


def test_secrets_have_no_words():
    assert "array" not in repr(deal(*SEEDS, index=0)[0])
