"""An example of each message between aggregator, workers, keeper and devices, as seeds of the parsers' tests."""

from __future__ import annotations

from collections import defaultdict

from aggregator.keeper.memory import KeeperMemory, LooksUsed, Opened
from aggregator.looks import LookAsked, LooksAsked
from edge_client.storage.pending_upload import Pieces
from shoal.protocol import cells, jobs, shards, sums
from shoal.protocol.codec import encode
from shoal.protocol.messages import Phase

RUN, NONCE, DIGEST, KEY = b"r" * 16, b"n" * 16, b"d" * 32, b"k" * 16
PART = jobs.StoredPart("dev-1", Phase.TRAIN, DIGEST, 2.5)
NODES = (
    jobs.VectorNode(jobs.NodeKind.UPDATE, (0,)),
    jobs.VectorNode(jobs.NodeKind.UPDATE, (1,)),
    jobs.VectorNode(jobs.NodeKind.MEAN, (0, 1), (1.0, 3.0)),
)
ADDRESS = jobs.GroupAddress("g", "gloo/0", b"fe80::1 4000")
MEAN = jobs.MeanOnBroker(model=0, round=1, key_id=KEY, length=160, segment="", digest=DIGEST)


def job(kind, vectors, **more):
    """Return a job on the mean of two updates."""
    return jobs.Job(
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


FIGURES = sums.Figures(loss=1.5, correct=3, tested=4, norm=2.0)
CELL = cells.Cell(Phase.TRAIN, 1, True, (b"share", b"other", b"third"))
CELL_FIGURES = cells.CellFigures(
    count=3, loss=1.5, correct=9, tested=12, norm=2.0, longest=3.0, margins=((0.5, 1.0, 1.5),)
)
OPENED = Opened(1, 2, DIGEST, ((KEY, NONCE, RUN),))
LOOK = cells.Look(1, b"deal", b"masked", b"product")
USED = LooksUsed(RUN, (DIGEST,), (DIGEST,))
PARTITION = cells.Partition(b"\x00\x01", gap=True)
ASKED = LookAsked(Phase.TRAIN, 1, 2, ("dev-1", "dev-2"))

EXAMPLES = (
    FIGURES,
    sums.KeeperShare(
        fleet="demo",
        run_id=RUN,
        round=2,
        phase=Phase.TRAIN,
        nonce=NONCE,
        device="dev-1",
        recipient=DIGEST,
        model=1,
        length=160,
        pad=DIGEST,
        figures=FIGURES,
    ),
    CELL,
    cells.OpenCells(run_id=RUN, round=2, nonce=NONCE, plan=b"plan", cells=(CELL,)),
    CELL_FIGURES,
    cells.CellSums(run_id=RUN, round=2, request=DIGEST, cells=(CELL_FIGURES,)),
    cells.CellSums(run_id=RUN, round=2, request=DIGEST, refused="why", recent=(((KEY, NONCE, RUN),),)),
    OPENED,
    LOOK,
    sums.SumCodes((1, 2), (3, 4), (5, 6)),
    USED,
    PARTITION,
    ASKED,
    LooksAsked(2, 3, (ASKED,)),
    cells.LookDeal(run_id=RUN, index=1, seed=DIGEST, share=b"share"),
    cells.OpenCells(run_id=RUN, round=2, nonce=NONCE, plan=b"plan", cells=(CELL,), look=LOOK),
    cells.CellSums(run_id=RUN, round=2, request=DIGEST, masked=b"masked", partitions=(PARTITION,), used=1),
    KeeperMemory((OPENED,), USED),
    shards.UploadPart(
        fleet="demo", run_id=RUN, round=2, phase=Phase.TRAIN, nonce=NONCE, device="dev-1", recipient=DIGEST, worker=1
    ),
    PART,
    jobs.PartReport(RUN, 1, 2, (PART,)),
    shards.MeanPartHeader(
        fleet="demo", run_id=RUN, round=2, key_id=KEY, model=0, length=160, segment="cluster", worker=1
    ),
    *NODES,
    jobs.MeanPlace(0, "cluster"),
    job(jobs.JobKind.PRODUCTS, (0, 1), count=1, precise=True),
    job(jobs.JobKind.MEANS, (2,), means=(jobs.MeanPlace(0, ""),)),
    jobs.JobDone(RUN, 1, 4, (DIGEST,)),
    job(jobs.JobKind.MEET, (), addresses=(ADDRESS,)),
    ADDRESS,
    jobs.JobDone(RUN, 1, 4, (), ("dev-2",), "a part is not there"),
    jobs.JobDone(RUN, 1, 0, addresses=(ADDRESS,)),
    MEAN,
    jobs.ShardOrder(
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
    jobs.WorkerPresence("demo", "worker-0", 7, True, "0.2.0"),
    Pieces((KEY, NONCE), (300, 120)),
)


def samples():
    """Return type -> encoded examples."""
    found = defaultdict(list)
    for example in EXAMPLES:
        found[type(example)].append(encode(example))
    return found
