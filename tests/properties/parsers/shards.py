"""An example of each message between coordinator, workers and devices, as seeds of the parsers' tests."""

from __future__ import annotations

from collections import defaultdict

from edge_client.upload_pieces import Pieces
from shoal.protocol import shards
from shoal.protocol.codec import encode
from shoal.protocol.messages import Phase

RUN, NONCE, DIGEST, KEY = b"r" * 16, b"n" * 16, b"d" * 32, b"k" * 16
PART = shards.StoredPart("dev-1", Phase.TRAIN, DIGEST, 2.5)
NODES = (
    shards.VectorNode(shards.NodeKind.UPDATE, (0,)),
    shards.VectorNode(shards.NodeKind.UPDATE, (1,)),
    shards.VectorNode(shards.NodeKind.MEAN, (0, 1), (1.0, 3.0)),
)
ADDRESS = shards.GroupAddress("g", "gloo/0", b"fe80::1 4000")
MEAN = shards.MeanOnBroker(model=0, round=1, key_id=KEY, length=160, segment="", digest=DIGEST)


def job(kind, vectors, **more):
    """Return a job on the mean of two updates."""
    return shards.Job(
        run_id=RUN,
        number=4,
        kind=kind,
        round=2,
        generation="g",
        devices=("dev-1", "dev-2"),
        digests=(DIGEST, DIGEST),
        nodes=NODES,
        vectors=vectors,
        **more,
    )


EXAMPLES = (
    shards.UploadPart(
        fleet="demo", run_id=RUN, round=2, phase=Phase.TRAIN, nonce=NONCE, device="dev-1", recipient=DIGEST, worker=1
    ),
    PART,
    shards.PartReport(RUN, 1, 2, (PART,)),
    shards.MeanPartHeader(
        fleet="demo", run_id=RUN, round=2, key_id=KEY, model=0, length=160, segment="cluster", worker=1
    ),
    *NODES,
    shards.MeanPlace(0, "cluster"),
    job(shards.JobKind.PRODUCTS, (0, 1), count=1, precise=True),
    job(shards.JobKind.MEANS, (2,), means=(shards.MeanPlace(0, ""),)),
    shards.JobDone(RUN, 1, 4, (DIGEST,)),
    job(shards.JobKind.MEET, (), addresses=(ADDRESS,)),
    ADDRESS,
    shards.JobDone(RUN, 1, 4, (), ("dev-2",), "a part is not there"),
    shards.JobDone(RUN, 1, 0, addresses=(ADDRESS,)),
    MEAN,
    shards.ShardOrder(
        run_id=RUN,
        birth=7,
        number=3,
        round=2,
        nonce=NONCE,
        key_version=1,
        keep=1,
        devices=("dev-1", "dev-2"),
        means=(MEAN,),
        plan=b"plan",
    ),
    shards.WorkerPresence("demo", "worker-0", 7, True, "0.2.0"),
    Pieces((KEY, NONCE), (300, 120)),
)


def samples():
    """Return type -> encoded examples."""
    found = defaultdict(list)
    for example in EXAMPLES:
        found[type(example)].append(encode(example))
    return found
