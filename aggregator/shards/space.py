"""The coordinator's view of its workers: writes jobs for them and adds up what they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.parted import check_gram_size
from aggregator.shards.calculation import assembled, written
from shoal.errors import ShoalError
from shoal.protocol.jobs import Job, JobKind

if TYPE_CHECKING:
    from aggregator.numerics.parted import PartedVector
    from shoal.protocol.documents import RunPlan
    from shoal.protocol.jobs import JobDone, MeanPlace


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
        ...

    def answers(self, jobs: Sequence[Job]) -> list[JobDone]:
        """Have each worker carry out its job of means; return their answers in the order of the workers.

        Raises:
            ShardsUnavailableError: as `sums`.
        """
        ...


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

    def gram(self, vectors: Sequence[PartedVector], *, precise: bool = False) -> NDArray[np.float64]:
        """Return the products of vectors with each other, (n, n); see `VectorSpace`.

        Raises:
            NumericsError: they are too many for one matrix.
            ShardsUnavailableError: a worker is missing.
        """
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
