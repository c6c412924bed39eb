"""A device takes a mean only if it is a sum of updates that devices have made in that round."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.summed import OpenedSum, summed_body
from crypto.mask.schedule import VersionKey
from crypto.sums.codes import added
from crypto.sums.ring import average, numbers_in, step_in
from edge_client.models.sum_codes import checked_mean, update_codes
from shoal.errors import NoSumError, UntrustedError, WireError
from shoal.protocol.codec import encode
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.sums import SumCodes
from tests.helpers.keepers import plan_of
from tests.helpers.plans import D

SEGMENTS = (SegmentSpec("shared", 4), SegmentSpec("cluster", 2))


@pytest.fixture
def plan():
    return plan_of()


def keys_of(plan, round_=1):
    chain = VersionKey(plan.fleet, plan.key_version, bytes(range(32))).begin_run(plan.run_id, first_round=1)
    return [chain.take() for _ in range(round_)][-1]


def opened(plan, model, count, round_=1, unit=0.0):
    """Return an opened cell of devices that trained from a model, in steps of 16 bits if a unit was announced."""
    rng = np.random.default_rng([model, count, round_])
    updates = [rng.normal(size=D).astype(np.float32) for _ in range(count)]
    words = [numbers_in(plan, unit, u) for u in updates]
    total = sum(words, np.zeros(D, np.uint32))
    codes = added(update_codes(w, keys_of(plan, round_), plan, model, unit) for w in words)
    return OpenedSum(model, count, total, average(total, count, step_in(plan, unit)), codes, unit)


def body_of(plan, *sums, segment=""):
    """Return what devices get for the mean of cells, and that mean."""
    count = sum(one.count for one in sums)
    span = plan.span(segment)
    mean = sum(one.count / count * one.mean[span] for one in sums)
    return summed_body(mean.astype(np.float32), sums, segment, plan)


@pytest.mark.parametrize("unit", [0.0, 0.04])
@pytest.mark.parametrize("cells", [[(0, 3)], [(0, 5), (1, 4)], [(2, 3), (2, 7)]])
def test_sums_are_taken(plan, cells, unit):
    body, vector = body_of(plan, *(opened(plan, *cell, unit=unit) for cell in cells))
    found = checked_mean(memoryview(body), keys_of(plan), plan, "", 0)
    assert found.tobytes() == vector.tobytes()


def test_one_cell_of_several(plan):
    cells = [opened(plan, model, 4) for model in range(5)]
    body, vector = summed_body(cells[3].mean, cells, "", plan)
    assert vector.tobytes() == cells[3].mean.tobytes()
    assert (checked_mean(memoryview(body), keys_of(plan), plan, "", 0) == cells[3].mean).all()


@pytest.mark.parametrize("segment", ["shared", "cluster", ""])
def test_segments_have_codes_of_their_own(plan, segment):
    plan = dataclasses.replace(plan, segments=SEGMENTS)
    cells = opened(plan, 0, 4), opened(plan, 1, 3)
    chosen = cells if segment == "shared" else cells[:1]
    body, vector = body_of(plan, *chosen, segment=segment)
    assert (checked_mean(memoryview(body), keys_of(plan), plan, segment, 0) == vector).all()
    if segment:
        with pytest.raises((NoSumError, UntrustedError, WireError)):
            checked_mean(memoryview(body), keys_of(plan), plan, "cluster" if segment == "shared" else "shared", 0)


def crafted(plan):
    """Yield bodies that an aggregator could make of what it has, and of nothing."""
    first, second, later = opened(plan, 0, 5), opened(plan, 1, 4), opened(plan, 0, 5, round_=2)

    def body(words, models=(0,), counts=(5,), codes=first.codes, unit=0.0):
        return np.asarray(words, np.uint32).tobytes() + encode(SumCodes(models, counts, codes, unit))

    rng = np.random.default_rng(1)
    for _ in range(200):
        yield body(rng.integers(0, 1 << 32, D, np.uint32))
    yield body(rng.permutation(first.words))
    yield body((first.words.view(np.int32) // 2).view(np.uint32))
    yield body(first.words, counts=(4,))
    yield body(first.words, models=(1,))
    yield body(first.words, codes=second.codes)
    yield body(first.words, unit=0.5)
    yield body(later.words, codes=later.codes)
    yield body(2 * first.words - second.words, counts=(6,), codes=first.codes)
    yield body(first.words, models=(0, 0), counts=(3, 2))
    yield body(first.words, models=(0, 1), counts=(3, 2))
    yield body(np.zeros(D), counts=(0,), codes=(0, 0))
    yield body(np.zeros(D), models=(), counts=(), codes=(0, 0))
    yield body(first.words, codes=first.codes[:1])
    yield body(first.words, counts=(5, 3))
    yield body(first.words[1:])
    yield first.words.tobytes()


def test_crafted_means_are_refused(plan):
    for made in crafted(plan):
        with pytest.raises((NoSumError, UntrustedError, WireError)):
            checked_mean(memoryview(made), keys_of(plan), plan, "", 0)


def test_more_updates_than_the_plan_allows(plan):
    body, _ = body_of(plan, opened(plan, 0, 60), opened(plan, 1, 60))
    with pytest.raises(UntrustedError, match="a sum of"):
        checked_mean(memoryview(body), keys_of(plan), plan, "", 0)
