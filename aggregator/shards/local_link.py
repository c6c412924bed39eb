"""Jobs for workers in the same process, as the loopback fleet and the tests drive them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aggregator.shards.space import ShardsUnavailableError
from shoal.errors import UntrustedError
from shoal.protocol.codec import decode, encode
from shoal.protocol.jobs import Job

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aggregator.shards.worker import WorkerService
    from shoal.protocol.jobs import JobDone


class LocalLink:
    """Calls the workers (`aggregator.shards.space.JobLink`).

    Args:
        workers: returns the worker of each number; None for one that is not running.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerService | None]]) -> None:
        self._workers = workers

    def sums(self, jobs: Sequence[Job]) -> Iterator[NDArray[np.float64]]:
        """Yield the sums of the workers' blocks."""
        try:
            blocks = [worker.blocks(_sent(job)) for worker, job in zip(self._running(), jobs, strict=True)]
        except UntrustedError as error:
            raise ShardsUnavailableError(str(error)) from error
        for parts in zip(*blocks, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            yield total

    def answers(self, jobs: Sequence[Job]) -> list[JobDone]:
        """Return the workers' answers to a job of means."""
        return [worker.answer(_sent(job)) for worker, job in zip(self._running(), jobs, strict=True)]

    def _running(self) -> list[WorkerService]:
        found = list(self._workers())
        missing = [f"worker {number}" for number, worker in enumerate(found) if worker is None]
        if missing:
            raise ShardsUnavailableError(f"{', '.join(missing)} not running", missing)
        return [worker for worker in found if worker is not None]


def _sent(job: Job) -> Job:
    """Return the job as its worker decodes it."""
    return decode(encode(job), Job)
