"""The ranks of a simulated run: processes that torchrun has started, each of which trains some of the devices.

Rules:

1. All ranks run the same strategy on the same state. They divide the devices of an assignment, and gather the reports, so
   that every rank knows all uploads. A sum is taken in the order of ranks, so it has the same bits on all of them.
2. Only tensors of numbers are sent, by Gloo. It has neither authentication nor encryption, so ranks on several machines need
   a private network; on one machine they are bound to loopback.
3. Before each round the ranks compare a digest of its models and assignments. Ranks that differ end with an error.
4. A rank that ends closes its connections, which ends the others with `LostRankError`.

Example: with 2 ranks and devices of 30, 10, 20 and 20 samples, rank 0 has the devices 0 and 1, and rank 1 the other two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from aggregator.numerics.backend import Backend
from aggregator.numerics.rows import Updates, check_rows
from shoal.errors import ConfigError, IntegrityError, NotReadyError

LONGEST_WAIT_S: Final = 3600.0
"""Most seconds that a rank waits for another: more than the work of two ranks in a round differs."""
CHUNK: Final = 1 << 22
"""Numbers that are summed at a time: 32 MB of each rank."""
LEAST_COLUMNS: Final = 4096
"""Fewest coordinates of vectors whose products are divided among ranks; below that, sending takes longer."""
LOOPBACK: Final = "lo"


class LostRankError(NotReadyError):
    """Another rank has ended, or can't be reached."""


class Ranks:
    """This process's place among the ranks, and the work that they share. All ranks call the same methods in the same order.

    Args:
        rank: number of this process, from 0; world: number of processes.
        local: number of this process among those of its machine.

    Attributes:
        rank, world: as above.
    """

    def __init__(self, rank: int = 0, world: int = 1, local: int = 0) -> None:
        self.rank, self.world, self._local = rank, world, local

    def device(self, name: str) -> str:
        """Return torch's name of the device on which this rank computes: each has a GPU of its own.

        Raises:
            ConfigError: there are fewer GPUs than ranks on this machine.
        """
        if name != "cuda" or self.world == 1:
            return name
        if self._local >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {self.rank} has no GPU of its own: this machine has {torch.cuda.device_count()}",
                hint="give torchrun --nproc-per-node no more than that, or use --device cpu",
            )
        return f"cuda:{self._local}"

    def parts(self, sizes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Divide some devices among the ranks, so that each has about as many samples.

        Args:
            sizes: samples of each device, shape (n,).

        Returns:
            for each rank the places of its devices in ``sizes``, ascending; some may be empty.
        """
        count, world = len(sizes), self.world
        if count == 0 or (sizes == sizes[0]).all():
            # Neighbours, whose samples often follow each other in memory and then need no copy.
            return np.split(np.arange(count), [count * rank // world for rank in range(1, world)])
        turn = np.arange(count) % (2 * world)
        owner = np.empty(count, np.int64)
        owner[np.argsort(-sizes, kind="stable")] = np.minimum(turn, 2 * world - 1 - turn)
        return [np.flatnonzero(owner == rank) for rank in range(world)]

    def rows(self, own: NDArray[Any], parts: Sequence[NDArray[np.int64]]) -> NDArray[Any]:
        """Return the rows of all ranks.

        Args:
            own: this rank's rows, shape (len(parts[rank]), w), of the same w and dtype on all ranks.
            parts: the places of each rank's rows, as `parts` returns them.
        """
        if self.world == 1:
            return own
        most = max(len(part) for part in parts)
        padded = np.zeros((most, own.shape[1]), own.dtype)
        padded[: len(own)] = own
        found = np.empty((sum(len(part) for part in parts), own.shape[1]), own.dtype)
        for part, rows in zip(parts, self._gathered(torch.from_numpy(padded)), strict=True):
            found[part] = rows[: len(part)].numpy()
        return found

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of ``values``, which have the same shape on each; in float64, in the order of ranks."""
        flat = values.detach().to("cpu", torch.float64).flatten()
        total = torch.zeros_like(flat)
        for start in range(0, len(flat), CHUNK):
            part = slice(start, start + CHUNK)
            for each in self._gathered(flat[part]):
                total[part] += each
        return total.view(values.shape)

    def agree(self, what: str, *parts: bytes) -> None:
        """Compare bytes with the other ranks'.

        Raises:
            IntegrityError: they differ; ``what`` names them.
        """
        if self.world == 1:
            return
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        first, *others = (
            each.tolist() for each in self._gathered(torch.tensor(list(digest.digest()), dtype=torch.uint8))
        )
        for rank, other in enumerate(others, 1):
            if other != first:
                raise IntegrityError(
                    f"rank {rank} and rank 0 differ in {what}",
                    hint="all ranks need the same version, libraries, options and data, and the same kind of processor",
                )

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, equal in shape and dtype.

        Raises:
            LostRankError: one of them does not answer.
        """
        if self.world == 1:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.world)]
        try:
            distributed.all_gather(found, own.contiguous())
        except RuntimeError as error:
            raise _lost(error) from error
        return found


class ByCoordinates:
    """A backend whose dot products are divided among ranks by coordinates; the rest is computed on each.

    Args:
        backend: computes each part; ranks: who share the work.
    """

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        self._backend, self._ranks = backend, ranks
        self.name = backend.name

    def gram(self, updates: Updates, *, precise: bool = False) -> NDArray[np.float64]:
        """See `Backend.gram`."""
        _, length = check_rows(updates, least=2)
        if length < LEAST_COLUMNS:
            return self._backend.gram(updates, precise=precise)
        return self._summed(self._backend.gram(self._columns(updates, length), precise=precise))

    def products(self, updates: Updates, others: Updates) -> NDArray[np.float64]:
        """See `Backend.products`."""
        _, length = check_rows(updates, least=1)
        if length < LEAST_COLUMNS:
            return self._backend.products(updates, others)
        return self._summed(self._backend.products(self._columns(updates, length), self._columns(others, length)))

    def city_block(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Backend.city_block`."""
        return self._backend.city_block(rows)

    def weighted_mean(self, updates: Updates, weights: NDArray[np.float64]) -> NDArray[np.float32]:
        """See `Backend.weighted_mean`."""
        return self._backend.weighted_mean(updates, weights)

    def _columns(self, updates: Updates, length: int) -> Updates:
        rank, world = self._ranks.rank, self._ranks.world
        mine = slice(length * rank // world, length * (rank + 1) // world)
        return updates[:, mine] if isinstance(updates, np.ndarray) else [row[mine] for row in updates]

    def _summed(self, own: NDArray[np.float64]) -> NDArray[np.float64]:
        total: NDArray[np.float64] = self._ranks.sum(torch.from_numpy(own)).numpy()
        return total


ALONE: Final = Ranks()
_RANKS: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current_ranks() -> Ranks:
    """Return the ranks of the innermost block of `torchrun_ranks` or `as_one`; a single one outside."""
    return _RANKS.get()


@contextmanager
def as_one() -> Iterator[None]:
    """Let the runs that are simulated inside the block use this process alone."""
    token = _RANKS.set(ALONE)
    try:
        yield
    finally:
        _RANKS.reset(token)


@contextmanager
def torchrun_ranks() -> Iterator[Ranks]:
    """Join the other processes that torchrun has started, if it has, for the runs that are simulated inside the block.

    Raises:
        LostRankError: they can't be reached.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    ranks = Ranks(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", "0")))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    try:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=LONGEST_WAIT_S))
    except (RuntimeError, ValueError) as error:
        raise _lost(error) from error
    token = _RANKS.set(ranks)
    try:
        yield ranks
    finally:
        _RANKS.reset(token)
        distributed.destroy_process_group()


def _lost(error: Exception) -> LostRankError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return LostRankError(
        f"another rank has ended, or can't be reached: {reason}",
        hint="its own messages say why; start all of them again",
    )
