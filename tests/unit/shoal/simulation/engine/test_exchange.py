"""Uploads that ranks exchange."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import ClientUpdate
from shoal.protocol.messages import Phase
from shoal.simulation.engine.exchange import exchange
from shoal.simulation.engine.ranks import Ranks

pytestmark = pytest.mark.torch
NAMES = ("a", "b", "c")
TEMPLATE = ClientUpdate(round=3, phase=Phase.TRAIN, device="", model=0, samples=0, loss=0.0, key_id=bytes(range(16)))


def update(name, number, *, margins=(), vector=None):
    return dataclasses.replace(
        TEMPLATE,
        device=name,
        model=number,
        samples=2**40 + number,
        loss=0.1 + number,
        margins=margins,
        correct=number,
        tested=number + 1,
        vector=vector,
        norm=0.3 * number,
        model_norm=0.7 * number,
        nearest=number + 2,
    )


class Two(Ranks):
    """Two ranks, of which this one is the first; the other's uploads are known."""

    def __init__(self, own, rows):
        super().__init__(0, 2)
        self.own, self.all = own, list(rows)

    def rows(self, own, parts):
        found = self.all.pop(0)
        np.testing.assert_array_equal(own, found[parts[0]])
        return found


def as_rows(updates, margins, length):
    """Return what all ranks together send, by an exchange of a single one."""
    seen = []

    class One(Ranks):
        def rows(self, own, _parts):
            seen.append(own)
            return own

    names = [u.device for u in updates]
    exchange(One(), updates, names, [np.arange(len(names))], TEMPLATE, margins=margins, length=length)
    return seen


@pytest.mark.parametrize("length", [0, 2])
def test_every_rank_has_all_uploads(length):
    """With all figures to the bit, margins of different numbers, and updates if there are any."""
    vectors = [np.array([i, 1 / 3], np.float32) if length else None for i in range(3)]
    made = [
        update("a", 1, margins=(0.0, 0.25), vector=vectors[0]),
        update("b", 2, vector=vectors[1]),
        update("c", 3, margins=(0.0, -0.5, 1 / 3), vector=vectors[2]),
    ]
    parts = [np.array([0, 2]), np.array([1])]
    ranks = Two([made[0], made[2]], as_rows(made, 3, length))
    found = exchange(ranks, [made[0], made[2]], NAMES, parts, TEMPLATE, margins=3, length=length)
    assert [dataclasses.replace(u, vector=None) for u in found] == [dataclasses.replace(u, vector=None) for u in made]
    for theirs, mine in zip(found, made, strict=True):
        if length:
            np.testing.assert_array_equal(theirs.vector, mine.vector)
        else:
            assert theirs.vector is None


def test_empty_rank_sends_rows_of_the_width():
    """A rank without devices sends rows of the same width."""
    seen = []

    class Idle(Ranks):
        def rows(self, own, _parts):
            seen.append(own.shape)
            return np.zeros((1, own.shape[1]), own.dtype)

    parts = [np.array([0]), np.arange(0)]
    exchange(Idle(1, 2), [], ["a"], parts, TEMPLATE, margins=2, length=5)
    assert seen == [(0, 8 + 2), (0, 5)]
