"""Workers' calculations on parts give the vectors, products and norms of one process."""

import dataclasses

import numpy as np
import pytest

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.parted import PartedVector, mean_of, plain_mean_of, wide_mean_of
from aggregator.shards import calculation
from aggregator.shards.calculation import PartCalculator, assembled, block_shapes, row_blocks, written
from shoal.protocol.codec import decode, encode
from shoal.protocol.jobs import Job, JobKind, NodeKind
from shoal.protocol.shards import borders

LENGTH, COUNT, WORKERS = 203, 5, 3
RNG = np.random.default_rng(3)
ROWS = {f"dev-{i}": RNG.standard_normal(LENGTH).astype(np.float32) for i in range(COUNT)}


def update(name):
    return PartedVector(None, LENGTH, NodeKind.UPDATE, device=name, digests=(bytes(32),) * WORKERS)


def job_of(vectors, kind=JobKind.NORMS, **parts):
    found = written(vectors)
    job = Job(
        run_id=bytes(16),
        number=1,
        kind=kind,
        round=1,
        generation="",
        devices=found.devices,
        digests=tuple(d[0] for d in found.digests),
        nodes=found.nodes,
        vectors=found.vectors,
        **parts,
    )
    return decode(encode(job), Job)


def calculators(job):
    return [PartCalculator(job, (a, b), lambda name, a=a, b=b: ROWS[name][a:b]) for a, b in borders(LENGTH, WORKERS)]


def joined(job, place=0):
    return np.concatenate([c.vectors()[place] for c in calculators(job)])


def summed(job):
    blocks = [list(c.blocks()) for c in calculators(job)]
    assert [b.shape for b in blocks[0]] == block_shapes(job)
    return assembled(job, iter([sum(parts) for parts in zip(*blocks, strict=True)]))


UPDATES = [update(name) for name in ROWS]
MATRIX = np.stack(list(ROWS.values()))
WEIGHTS = np.arange(1.0, COUNT + 1)
MEAN = weighted_mean(MATRIX, WEIGHTS)


@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        (mean_of(UPDATES, WEIGHTS), MEAN),
        (UPDATES[0] + UPDATES[1], MATRIX[0] + MATRIX[1]),
        (UPDATES[0] - mean_of(UPDATES, WEIGHTS), MATRIX[0] - MEAN),
        (UPDATES[0] * np.float32(0.3), MATRIX[0] * np.float32(0.3)),
        (plain_mean_of(UPDATES[:3], 4), plain_mean_of(list(MATRIX[:3]), 4)),
        (wide_mean_of(UPDATES[:2], [1.5, 2.5]), wide_mean_of(list(MATRIX[:2]), [1.5, 2.5])),
        (UPDATES[0][10:170], MATRIX[0][10:170]),
        (UPDATES[0][::7], MATRIX[0][::7]),
    ],
    ids=["mean", "sum", "difference", "multiple", "plain mean", "wide mean", "slice", "every seventh"],
)
def test_parts_joined_have_bits_of_the_whole(vector, expected):
    assert joined(job_of([vector])).tobytes() == expected.tobytes()


def test_a_vector_used_twice_is_made_once():
    mean = mean_of(UPDATES, WEIGHTS)
    assert len(written([mean, mean + UPDATES[0], mean]).nodes) == COUNT + 2


def test_sums_are_those_of_one_process(monkeypatch):
    products = MATRIX.astype(np.float64) @ MATRIX.T
    np.testing.assert_allclose(summed(job_of(UPDATES, JobKind.GRAM)), products, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(summed(job_of(UPDATES, JobKind.GRAM, precise=True)), products, rtol=1e-12)
    np.testing.assert_allclose(summed(job_of(UPDATES)), np.diagonal(products), rtol=1e-5)
    found = summed(job_of(UPDATES, JobKind.PRODUCTS, count=2))
    np.testing.assert_allclose(found, products[:2, 2:], rtol=1e-5, atol=1e-4)
    # In blocks of two rows.
    monkeypatch.setattr(calculation, "BLOCK_BYTES", 2 * 8 * COUNT)
    blocked = summed(job_of(UPDATES, JobKind.GRAM))
    assert len(block_shapes(job_of(UPDATES, JobKind.GRAM))) == 3
    np.testing.assert_allclose(blocked, products, rtol=1e-5, atol=1e-4)
    assert (blocked == blocked.T).all()


def test_blocks_never_pass_their_limit():
    for count in (1, 700, 5_792, 20_000):
        assert all(8 * (r.stop - r.start) * count <= calculation.BLOCK_BYTES for r in row_blocks(count, count))


def test_long_sum_needs_no_recursion():
    """A sum of a thousand vectors is written without recursion."""
    total = UPDATES[0]
    for _ in range(3000):
        total = total + UPDATES[1]
    assert len(written([total]).nodes) == 3002
    assert dataclasses.is_dataclass(written([total]))
