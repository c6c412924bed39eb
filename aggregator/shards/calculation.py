"""Calculations on parts of vectors: the coordinator writes them as jobs, a worker carries them out on its coordinates.

Products are formed and sent in blocks of rows, so that neither side needs the whole matrix of a large round at a time: a worker
holds one block, the coordinator the sum. All blocks come in one order, and the workers' blocks are added in the order of the
workers: the same round gives the same bits.

`Shards` writes the jobs of the coordinator, and adds up what the workers return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import Backend, NumpyBackend
from aggregator.numerics.parted import PartedVector, check_gram_size, wide_mean_of
from aggregator.numerics.rows import check_rows, column_chunks
from shoal.errors import ShoalError
from shoal.protocol.documents import RunPlan
from shoal.protocol.jobs import Job, JobDone, JobKind, MeanPlace, NodeKind, VectorNode
from shoal.types import Float32Vector

BLOCK_BYTES: Final = 32 << 20
"""Largest block of products, float64, that a worker makes and sends at a time."""


@dataclass(frozen=True, slots=True)
class Calculation:
    """Vectors as the nodes of a job.

    Attributes:
        devices: whose updates are used; digests: the parts' digests of each, by worker.
        nodes: see `shoal.protocol.jobs.Job`.
        vectors: places of the vectors that were asked for.
    """

    devices: tuple[str, ...]
    digests: tuple[tuple[bytes, ...], ...]
    nodes: tuple[VectorNode, ...]
    vectors: tuple[int, ...]


def written(vectors: Sequence[PartedVector]) -> Calculation:
    """Return the calculation that makes ``vectors``; a vector that is used several times is made once."""
    nodes: list[VectorNode] = []
    places: dict[int, int] = {}
    devices: dict[str, int] = {}
    digests: list[tuple[bytes, ...]] = []

    def update(vector: PartedVector) -> tuple[int, ...]:
        if vector.device not in devices:
            devices[vector.device] = len(devices)
            digests.append(vector.digests)
        return (devices[vector.device],)

    for vector in vectors:
        # Without recursion: a sum of a thousand vectors is a thousand steps deep.
        open_: list[PartedVector] = [vector]
        while open_:
            at = open_[-1]
            waits = [item for item in at.items if id(item) not in places]
            if id(at) not in places and not waits:
                items = update(at) if at.kind is NodeKind.UPDATE else tuple(places[id(item)] for item in at.items)
                if at.kind is NodeKind.SLICE:
                    items = (*items, *at.bounds)
                places[id(at)] = len(nodes)
                nodes.append(VectorNode(at.kind, items, at.weights))
            if waits:
                open_.extend(waits)
            else:
                open_.pop()
    return Calculation(tuple(devices), tuple(digests), tuple(nodes), tuple(places[id(v)] for v in vectors))


class PartCalculator:
    """Makes the vectors of a job on one worker's coordinates.

    Args:
        job: the job.
        part: first coordinate of the worker's part, and the one after its last.
        update: returns the worker's part of a device's update, (stop - start,) float32.
        backend: forms products; numpy if None.
    """

    def __init__(
        self,
        job: Job,
        part: tuple[int, int],
        update: Callable[[str], Float32Vector],
        backend: Backend | None = None,
    ) -> None:
        self._job = job
        self._start, self._stop = part
        self._update = update
        self._backend = backend or NumpyBackend()
        self._made: dict[int, Any] = {}

    def vectors(self) -> list[Float32Vector]:
        """Return the vectors that the job asks for, on this part; updates are views of their file."""
        return [self.vector(place) for place in self._job.vectors]

    def vector(self, place: int) -> Any:
        """Return one vector of the job on this part, float32. Only vectors that are not updates are remembered."""
        # Nodes come after those they take, so this makes each of them before it is needed.
        if place in self._made:
            return self._made[place]
        needed, open_ = set[int](), [place]
        while open_:
            at = open_.pop()
            if at not in needed and at not in self._made:
                needed.add(at)
                node = self._job.nodes[at]
                open_.extend(_sources(node))
        for at in sorted(needed):
            self._made[at] = self._computed(self._job.nodes[at])
        return self._made[place]

    def _computed(self, node: VectorNode) -> Any:
        made, items, weights = self._made, node.items, node.weights
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            match node.kind:
                case NodeKind.UPDATE:
                    return self._update(self._job.devices[items[0]])
                case NodeKind.MEAN:
                    return weighted_mean([made[at] for at in items], np.array(weights))
                case NodeKind.SUM:
                    return made[items[0]] + made[items[1]]
                case NodeKind.DIFFERENCE:
                    return made[items[0]] - made[items[1]]
                case NodeKind.TIMES:
                    return made[items[0]] * np.float32(weights[0])
                case NodeKind.OVER:
                    return made[items[0]] / np.float32(weights[0])
                case NodeKind.SLICE:
                    return made[items[0]][self._slice(*items[1:])]
                case NodeKind.WIDE_MEAN:
                    return wide_mean_of([made[at] for at in items], weights)

    def _slice(self, first: int, last: int, step: int) -> slice:
        """Return the coordinates of range(first, last, step) that lie in this part, counted from its start."""
        start = first if first >= self._start else first + step * -(-(self._start - first) // step)
        return slice(max(0, start - self._start), max(0, min(last, self._stop) - self._start), step)

    def blocks(self) -> Iterator[NDArray[np.float64]]:
        """Yield this part's share of the job's sums, as `block_shapes` lists them."""
        job, vectors = self._job, [np.ascontiguousarray(v) for v in self.vectors()]
        if job.kind is JobKind.NORMS:
            for rows in row_blocks(len(vectors), 1):
                yield np.array([[squared_norm(v)] for v in vectors[rows]])
            return
        if job.kind is JobKind.PRODUCTS:
            first, others = vectors[: job.count], vectors[job.count :]
            for rows in row_blocks(len(first), len(others)):
                yield self._products(first[rows], others)
            return
        for rows in row_blocks(len(vectors), len(vectors)):
            if rows.stop - rows.start == len(vectors):
                yield self._gram(vectors)
            else:
                yield self._products(vectors[rows], vectors[: rows.stop])

    def _gram(self, vectors: list[Float32Vector]) -> NDArray[np.float64]:
        if not len(vectors[0]) or self._job.precise or len(vectors) < 2:
            return self._products(vectors, vectors)
        return self._backend.gram(vectors)

    def _products(self, vectors: list[Float32Vector], others: list[Float32Vector]) -> NDArray[np.float64]:
        if not len(vectors[0]):
            return np.zeros((len(vectors), len(others)))
        if not self._job.precise:
            return self._backend.products(vectors, others)
        total = np.zeros((len(vectors), len(others)))
        width = max(1, BLOCK_BYTES // (8 * (len(vectors) + len(others))))
        with np.errstate(over="ignore", invalid="ignore"):
            for one, other in zip(
                column_chunks(vectors, copy=True, width=width),
                column_chunks(others, copy=True, width=width),
                strict=True,
            ):
                total += one.astype(np.float64) @ other.astype(np.float64).T
        return total


def _sources(node: VectorNode) -> tuple[int, ...]:
    """Return the places of the nodes that a node takes."""
    if node.kind is NodeKind.UPDATE:
        return ()
    return node.items[:1] if node.kind is NodeKind.SLICE else node.items


def squared_norm(vector: Float32Vector) -> float:
    """Return the squared norm of a part, by blocks of float32 products as `aggregator.strategies.base.norm_of` forms it."""
    total = 0.0
    for start in range(0, len(vector), 1 << 16):
        block = vector[start : start + (1 << 16)]
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.dot(block, block))
    return total


def row_blocks(count: int, width: int) -> list[slice]:
    """Return the blocks of rows in which a matrix (count, width) of float64 is made: each at most BLOCK_BYTES."""
    height = max(1, BLOCK_BYTES // (8 * max(1, width)))
    return [slice(start, min(start + height, count)) for start in range(0, count, height)]


def block_shapes(job: Job) -> list[tuple[int, int]]:
    """Return the shapes of the blocks of a job's sums, in the order in which workers send them.

    The blocks of a matrix of products with each other have the columns up to their last row only: it is symmetric.
    """
    count = len(job.vectors)
    if job.kind is JobKind.NORMS:
        return [(rows.stop - rows.start, 1) for rows in row_blocks(count, 1)]
    if job.kind is JobKind.PRODUCTS:
        others = count - job.count
        return [(rows.stop - rows.start, others) for rows in row_blocks(job.count, others)]
    return [(rows.stop - rows.start, rows.stop) for rows in row_blocks(count, count)]


def assembled(job: Job, blocks: Iterator[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the sums of a job from the blocks that `block_shapes` lists: (n, n), (n, k) or (n,)."""
    count = len(job.vectors)
    if job.kind is not JobKind.GRAM:
        whole: NDArray[np.float64] = np.concatenate(list(blocks))
        return whole[:, 0] if job.kind is JobKind.NORMS else whole
    whole, at = np.zeros((count, count)), 0
    for block in blocks:
        rows, columns = block.shape
        whole[at : at + rows, :columns] = block
        whole[:columns, at : at + rows] = block.T
        at += rows
    # The last square of each block has both halves, which may differ in the last bit.
    upper = np.triu(whole)
    upper += np.triu(whole, 1).T
    return upper


class ShardsUnavailableError(ShoalError):
    """A worker is needed and can't be reached. The close of the round is repeated once all workers are there.

    Attributes:
        names: of the workers that are missing, as far as is known.
    """

    def __init__(self, reason: str, names: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.names = tuple(names)


class JobLink(Protocol):
    """Carries jobs to all workers and their results back: in this process, or over MQTT and torch.distributed."""

    def sums(self, jobs: Sequence[Job]) -> Iterator[NDArray[np.float64]]:
        """Have each worker carry out its job; yield the sums of their blocks, added in the order of the workers.

        Raises:
            ShardsUnavailableError: a worker is missing, or was lost on the way.
        """

    def answers(self, jobs: Sequence[Job]) -> list[JobDone]:
        """Have each worker carry out its job of means; return their answers in the order of the workers.

        Raises:
            ShardsUnavailableError: as `sums`.
        """


class Shards:
    """The vectors of a run whose coordinates the workers hold (`aggregator.numerics.parted.VectorSpace`).

    Args:
        run: the owner's plan.
        link: carries the jobs.
    """

    def __init__(self, run: RunPlan, link: JobLink) -> None:
        self._run = run
        self._link = link
        self.number = 0
        self.round = 0

    def gram(self, vectors: Any, *, precise: bool = False) -> NDArray[np.float64]:
        """Return the products of vectors with each other, (n, n); see `VectorSpace`.

        Raises:
            NumericsError: they are too many for one matrix.
            ShardsUnavailableError: a worker is missing.
        """
        check_rows(vectors, least=2)
        check_gram_size(len(vectors))
        return self._sums(JobKind.GRAM, vectors, precise=precise)

    def products(self, vectors: Sequence[PartedVector], others: Sequence[PartedVector]) -> NDArray[np.float64]:
        """Return the products of n vectors with k others, (n, k); raises as `gram`."""
        return self._sums(JobKind.PRODUCTS, (*vectors, *others), count=len(vectors))

    def squared_norms(self, vectors: Sequence[PartedVector]) -> NDArray[np.float64]:
        """Return the squared norms of vectors, (n,); raises as `gram`."""
        return self._sums(JobKind.NORMS, vectors)

    def means(
        self, vectors: Sequence[PartedVector], places: Sequence[MeanPlace], round_: int
    ) -> list[tuple[bytes, ...]]:
        """Have the parts of means stored; return the digests of each mean's parts, by worker.

        Raises:
            NumericsError: a mean is not finite.
            ShardsUnavailableError: a worker is missing.
        """
        answers = self._link.answers(self._jobs(JobKind.MEANS, vectors, round_=round_, means=tuple(places)))
        if any(len(answer.digests) != len(vectors) for answer in answers):
            raise ShardsUnavailableError("a worker has not made all means")
        return [tuple(answer.digests[at] for answer in answers) for at in range(len(vectors))]

    def _sums(self, kind: JobKind, vectors: Sequence[PartedVector], **parts: Any) -> NDArray[np.float64]:
        jobs = self._jobs(kind, vectors, **parts)
        return assembled(jobs[0], self._link.sums(jobs))

    def _jobs(
        self, kind: JobKind, vectors: Sequence[PartedVector], *, round_: int | None = None, **parts: Any
    ) -> list[Job]:
        """Return the job of each worker; they differ in the digests of the parts."""
        calculation = written(vectors)
        self.number += 1
        return [
            Job(
                run_id=self._run.run_id,
                number=self.number,
                kind=kind,
                round=self.round if round_ is None else round_,
                generation="",
                devices=calculation.devices,
                digests=tuple(digests[worker] for digests in calculation.digests),
                nodes=calculation.nodes,
                vectors=calculation.vectors,
                **parts,
            )
            for worker in range(len(self._run.workers))
        ]
