"""The keeper's rules about what may be opened, and the cells that an aggregator fits to them."""

from __future__ import annotations

import itertools
import random

import pytest

from shoal.protocol.cells import LEAST_CHANGE, allowed, fitted


def unions(cells):
    return [frozenset().union(*some) for n in range(1, len(cells) + 1) for some in itertools.combinations(cells, n)]


def by_definition(cells, recent):
    return not any(
        0 < len(a ^ b) < LEAST_CHANGE
        for before in recent
        for a in unions(cells)
        for b in [*unions(before), frozenset()]
    )


def parted(rng, devices, most=4):
    cells = [set() for _ in range(rng.randint(1, most))]
    for device in devices:
        if rng.random() < 0.9:
            rng.choice(cells).add(device)
    return [frozenset(cell) for cell in cells if len(cell) >= 3]


@pytest.mark.parametrize("seed", range(40))
def test_allowed_is_the_definition(seed):
    rng = random.Random(seed)
    devices = list(range(rng.randint(4, 14)))
    recent = [parted(rng, devices) for _ in range(3)]
    cells = parted(rng, devices)
    assert allowed(cells, recent) is by_definition(cells, recent)


def test_one_moves_between_cells():
    before = [frozenset("abcdef"), frozenset("ghijkl")]
    assert not allowed([frozenset("abcde"), frozenset("fghijkl")], [before])
    assert not allowed([frozenset("abc"), frozenset("fghijkl")], [before])
    assert allowed([frozenset("abc"), frozenset("ghijkl")], [before])


def test_union_alone_may_differ_too_little():
    # Each cell differs from each earlier one by at least three; the union of both lacks one device.
    before = [frozenset("abcdefgh")]
    cells = [frozenset("abcd"), frozenset("efg")]
    assert all(allowed([cell], [before]) for cell in cells)
    assert not allowed(cells, [before])


@pytest.mark.parametrize("seed", range(20))
def test_fitted_cells_are_allowed(seed):
    rng = random.Random(seed)
    devices, recent = list(range(rng.randint(6, 30))), []
    for _ in range(30):
        wanted = parted(rng, devices, 2)
        cells = [c for c in fitted(wanted, recent[-10:], 3, order=hash) if c]
        assert by_definition(cells, recent[-10:])
        assert all(any(cell <= whole for whole in wanted) for cell in cells)
        if cells:
            recent.append(cells)


def test_nobody_is_left_out_for_long():
    rng, devices, recent, out = random.Random(1), frozenset(range(8)), [], dict.fromkeys(range(8), 0)
    for round_ in range(200):
        there = frozenset(d for d in devices if rng.random() > 0.02)
        (cell,) = fitted([there], recent[-10:], 3, order=lambda _: rng.random())
        recent += [[cell]] if cell else []
        out = {d: 0 if d in cell else out[d] + 1 for d in devices}
        assert max(out.values()) <= 25, round_
