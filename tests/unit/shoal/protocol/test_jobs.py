"""Jobs that a worker can carry out."""

import pytest

from shoal.errors import WireError
from shoal.protocol.jobs import Job, JobKind, NodeKind, VectorNode


def job(*nodes, vectors=(0,), **changes):
    fixed = {"run_id": bytes(16), "number": 1, "kind": JobKind.NORMS, "round": 1, "generation": ""}
    return Job(**{**fixed, "devices": ("a",), "digests": (bytes(32),), "nodes": nodes, "vectors": vectors, **changes})


UPDATE = VectorNode(NodeKind.UPDATE, (0,))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: job(UPDATE, devices=()), "other digests"),
        (lambda: job(UPDATE, vectors=(1,)), "does not make"),
        (lambda: job(VectorNode(NodeKind.UPDATE, (1,))), "not there"),
        (lambda: job(VectorNode(NodeKind.SUM, (0, 0))), "not there"),
        (lambda: job(UPDATE, VectorNode(NodeKind.SUM, (0,))), "a sum of 1"),
        (lambda: job(UPDATE, VectorNode(NodeKind.MEAN, (0,))), "and 0 numbers"),
        (lambda: job(UPDATE, VectorNode(NodeKind.SLICE, (0, 0, 4, 0))), "not there"),
        (lambda: job(UPDATE, VectorNode(NodeKind.TIMES, (0,), (float("nan"),))), "not finite"),
        (lambda: job(UPDATE, kind=JobKind.MEANS), "does not name"),
    ],
)
def test_job_that_makes_no_sense_is_refused(make, reason):
    with pytest.raises(WireError, match=reason):
        make()
