"""The coordinator's jobs: one for each worker, sums in the order of the workers, and errors that make the round wait."""

import dataclasses

import numpy as np
import pytest

from aggregator.numerics.parted import PartedVector
from aggregator.shards.calculation import Shards, ShardsUnavailableError
from shoal.protocol.jobs import JobDone, JobKind, MeanPlace, NodeKind
from tests.unit.shoal.protocol.test_shards import with_workers


class Link:
    """Answers every job with the number of the worker."""

    def __init__(self, digests=1):
        self.jobs = []
        self._digests = digests

    def sums(self, jobs):
        self.jobs = list(jobs)
        yield np.full((len(jobs[0].vectors), 1), float(len(jobs)))

    def answers(self, jobs):
        self.jobs = list(jobs)
        return [JobDone(bytes(16), n, jobs[0].number, (bytes([n]) * 32,) * self._digests) for n in range(len(jobs))]


def test_worker_gets_digests_of_its_parts():
    """Each worker gets the digests of its own parts."""
    link = Link()
    shards = Shards(with_workers(3), link)
    shards.round = 4
    update = PartedVector(
        shards, 100, NodeKind.UPDATE, device="dev-1", digests=tuple(bytes([n]) * 32 for n in range(3))
    )
    assert shards.squared_norms([update]).tolist() == [3.0]
    assert [job.digests for job in link.jobs] == [(bytes([n]) * 32,) for n in range(3)]
    assert {(job.round, job.number, job.kind) for job in link.jobs} == {(4, 1, JobKind.NORMS)}
    assert shards.means([update], [MeanPlace(0, "")], 5) == [tuple(bytes([n]) * 32 for n in range(3))]
    assert {(job.round, job.number) for job in link.jobs} == {(5, 2)}


def test_missing_means_make_the_round_wait():
    """A worker without all means makes the round wait."""
    shards = Shards(with_workers(2), Link(digests=0))
    update = PartedVector(shards, 100, NodeKind.UPDATE, device="dev-1", digests=(bytes(32),) * 2)
    with pytest.raises(ShardsUnavailableError, match="not made all means"):
        shards.means([update], [MeanPlace(0, "")], 1)
    assert dataclasses.is_dataclass(update)
