"""Borders of parts."""

import dataclasses
from itertools import pairwise

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Member, RunPlan
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.shards import borders, digest_over, mean_part_number, part_bytes, part_of
from shoal.protocol.states import checkpoint_number, mean_number
from tests.helpers.plans import altered, run_plan


@pytest.mark.parametrize("length", [48, 100, 7850, 159_010])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_parts_cover_a_vector(length, workers):
    """The parts cover a vector at fixed places."""
    cuts = borders(length, workers)
    assert (cuts[0][0], cuts[-1][1]) == (0, length)
    assert all(a < b for a, b in cuts)
    assert all(a[1] == b[0] and a[1] % limits.PART_BLOCK == 0 for a, b in pairwise(cuts))
    if length > 1000:
        assert max(b - a for a, b in cuts) <= (1 / workers + 0.05) * length


def test_a_part_of_a_segment():
    """Without workers there are no parts; a digest depends on their order."""
    assert [part_of(slice(10, 40), part) for part in ((0, 32), (32, 64), (64, 96))] == [(0, 22), (22, 30), (0, 0)]
    assert borders(100, 0) == ()
    assert digest_over([bytes(32), b"\1" * 32]) != digest_over([b"\1" * 32, bytes(32)])


def test_parts_labels_are_nothing_elses():
    """Labels of parts are those of nothing else."""
    whole = {mean_number(m, r) for m in (0, limits.MAX_MODELS) for r in (1, 2)}
    taken = whole | {checkpoint_number(limits.MAX_MODELS)}
    parts = [mean_part_number(number, worker) for number in whole for worker in range(limits.MAX_WORKERS)]
    assert len({*parts, *taken}) == len(parts) + len(taken)


def with_workers(count, **changes):
    members = tuple(Member(f"worker-{n}", bytes([n]) * 32, bytes([n]) * 32) for n in range(count))
    plan = run_plan()
    segments = (dataclasses.replace(plan.segments[0], length=100),)
    return altered(plan, **{"workers": members, "segments": segments, **changes})


def test_a_plan_with_workers():
    plan = with_workers(3)
    assert decode(encode(plan), RunPlan) == plan
    assert sum(part_bytes(plan, worker) for worker in range(3)) == encoded_bytes(100, "float32")
    for wrong, reason in (
        ({"workers": plan.workers[:1]}, "from 2 to"),
        ({"workers": plan.workers[:1] * 2}, "twice"),
        ({"segments": (dataclasses.replace(plan.segments[0], length=47),)}, "too few"),
    ):
        with pytest.raises(WireError, match=reason):
            dataclasses.replace(plan, **wrong)
