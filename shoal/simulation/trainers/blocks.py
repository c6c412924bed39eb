"""Blocks of devices as padded tensors, and the batch orders of their training: the input of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.training import Shuffler
from shoal.errors import DataError, TaskError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Shard

_T = TypeVar("_T")
SIZE_RATIO: Final = 2.0
"""Largest ratio of sample counts in a padded block, so that at most half of a block is padding."""
SMALL_DEVICE: Final = 8
"""Devices with fewer samples count as having this many, since separate blocks for a few tiny devices gain nothing."""
UPDATE_FLOATS: Final = 16_000_000
"""Coordinates that the updates of a block may have together, 64 MB, unless a single device's has more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a trainer takes in one block.

    Attributes:
        devices: most devices of a block.
        samples: most samples of a block, padding included; a single device may have more.
        edge: a block holds no devices with more samples than this together with others; 0: no such edge.
        ratio: largest ratio of sample counts in a block beyond the edge; below the edge it is `SIZE_RATIO`.
    """

    devices: int
    samples: int = 1 << 20
    edge: int = 0
    ratio: float = SIZE_RATIO


@dataclass(frozen=True, slots=True)
class Block:
    """Some devices' samples, padded with zeros to the largest.

    Attributes:
        ids: the devices' places in the population, shape (c,).
        x: shape (c, n, *input shape); y: shape (c, n, *label shape).
        lengths: true samples of each device, shape (c,), int64; all n where nothing is padded.
    """

    ids: NDArray[np.int64]
    x: Tensor
    y: Tensor
    lengths: NDArray[np.int64]

    @property
    def padded(self) -> bool:
        """Whether some rows are padding."""
        return bool((self.lengths != self.x.shape[1]).any())

    def weights(self) -> Tensor:
        """Return each sample's weight in its device's mean, shape (c, n), float32; 0 for padding."""
        weights = np.zeros(self.x.shape[:2], np.float32)
        for row, n in zip(weights, self.lengths, strict=True):
            row[:n] = 1.0 / max(int(n), 1)
        return torch.from_numpy(weights).to(self.x.device)


class Shelf:
    """One share of every device's data on the computing device.

    Shards of equal size become one stack, which is a view of the given arrays if these are contiguous in memory.

    Args:
        shards: one shard a device.
        device: torch device of the tensors.
    """

    def __init__(self, shards: Sequence[Shard], device: str | torch.device = "cpu") -> None:
        self.sizes: NDArray[np.int64] = np.array([len(s) for s in shards], np.int64)
        self.device = torch.device(device)
        self._stack: tuple[Tensor, Tensor] | None = None
        self._parts: list[tuple[Tensor, Tensor]] = []
        if len(shards) and (self.sizes == self.sizes[0]).all() and self.sizes[0]:
            self._stack = (_stacked([s.x for s in shards], self.device), _stacked([s.y for s in shards], self.device))
        else:
            self._parts = [(_one(s.x, self.device), _one(s.y, self.device)) for s in shards]

    def __len__(self) -> int:
        return len(self.sizes)

    def block(self, ids: NDArray[np.int64]) -> Block:
        """Return the devices at the places ``ids`` (c,) as a block; a view where they follow each other."""
        lengths = self.sizes[ids]
        if self._stack is not None:
            x, y = self._stack
            if (np.diff(ids) == 1).all():
                rows: Any = slice(int(ids[0]), int(ids[-1]) + 1)
            else:
                rows = torch.from_numpy(ids).to(self.device)
            return Block(ids, x[rows], y[rows], lengths)
        longest = int(lengths.max())
        first_x, first_y = self._parts[int(ids[int(lengths.argmax())])]
        x = first_x.new_zeros((len(ids), longest, *first_x.shape[1:]))
        y = first_y.new_zeros((len(ids), longest, *first_y.shape[1:]))
        for row, place in enumerate(ids):
            n = int(lengths[row])
            if n:
                x[row, :n], y[row, :n] = self._parts[int(place)]
        return Block(ids, x, y, lengths)

    def joined(self, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the samples of the devices at ``ids`` (c,) one after another: x (total, ...) and y (total, ...)."""
        if self._stack is not None:
            block = self.block(ids)
            return block.x.flatten(0, 1), block.y.flatten(0, 1)
        parts = [self._parts[int(i)] for i in ids]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def parts(self, ids: NDArray[np.int64], limits: Limits) -> list[NDArray[np.int64]]:
        """Cut ``ids`` (c,) into blocks: in the order given where all are of one size, else largest first, alike in size."""
        if len(ids) == 0:
            return []
        sizes = self.sizes[ids]
        if not (sizes == sizes[0]).all():
            # Neighbours in this order are similar in size, so blocks need little padding.
            order = np.argsort(-sizes, kind="stable")
            ids, sizes = ids[order], sizes[order]
        cuts: list[NDArray[np.int64]] = []
        start = 0
        for at in range(1, len(ids) + 1):
            largest, count = int(sizes[start]), at - start
            full = at == len(ids) or count >= limits.devices or (count + 1) * largest > limits.samples
            ratio = limits.ratio if largest > limits.edge else SIZE_RATIO
            if full or largest > ratio * max(int(sizes[at]), SMALL_DEVICE) or largest > limits.edge >= sizes[at]:
                cuts.append(ids[start:at])
                start = at
        return cuts


def _stacked(arrays: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    first = arrays[0]
    if any(a.shape != first.shape or a.dtype != first.dtype for a in arrays):
        raise DataError("devices' samples differ in shape or dtype")
    start, step = first.__array_interface__["data"][0], first.nbytes
    # Arrays that follow each other in memory, as the slices of one data set do, are stacked without a copy.
    follows = all(
        a.flags.c_contiguous and a.__array_interface__["data"][0] == start + i * step for i, a in enumerate(arrays)
    )
    # torch.from_numpy wants writeable memory, so read-only arrays are copied.
    if follows and first.flags.writeable:
        whole = np.lib.stride_tricks.as_strided(first, (len(arrays), *first.shape), (step, *first.strides))
    else:
        whole = np.stack(arrays)
    return torch.from_numpy(whole).to(device)


def _one(values: NDArray[Any], device: torch.device) -> Tensor:
    whole = np.ascontiguousarray(values)
    return torch.from_numpy(whole if whole.flags.writeable else whole.copy()).to(device)


class Trained(Protocol):
    """The updates of a block of c devices; an implementation need not store them one by one."""

    @property
    def losses(self) -> NDArray[np.float64]:
        """Each device's mean loss over the samples it visited, shape (c,)."""

    def rows(self) -> Tensor:
        """Return every device's clear update, shape (c, d), float32."""

    def norms(self) -> NDArray[np.float64]:
        """Return every update's l2 norm, shape (c,)."""

    def add_to(self, total: Tensor, places: NDArray[np.int64], weights: NDArray[np.float32] | None) -> None:
        """Add the weighted sum of some devices' updates to ``total`` (d,).

        Args:
            total: shape (d,), float32.
            places: which rows of the block, shape (p,), int64, ascending.
            weights: one for each of them, shape (p,), float32; all 1 where None.
        """


@dataclass(frozen=True, slots=True)
class Rows:
    """Updates that exist one by one: ``updates`` (c, d)."""

    updates: Tensor
    losses: NDArray[np.float64]

    def rows(self) -> Tensor:
        """Return every device's clear update, shape (c, d), float32."""
        return self.updates

    def norms(self) -> NDArray[np.float64]:
        """Return every update's l2 norm, shape (c,)."""
        norms: NDArray[np.float64] = self.updates.norm(dim=1).double().cpu().numpy()
        return norms

    def add_to(self, total: Tensor, places: NDArray[np.int64], weights: NDArray[np.float32] | None) -> None:
        """Add the weighted sum of the updates at ``places`` to ``total`` (d,)."""
        every = np.zeros(len(self.updates), np.float32)
        every[places] = 1.0 if weights is None else weights
        total.addmv_(self.updates.T, torch.from_numpy(every).to(total.device))


class Trainer(Protocol):
    """A way to train the devices of a block; all ways give the same updates, up to float32 rounding."""

    def limits(self, candidates: int, local: LocalTraining) -> Limits:
        """Return the limits of a block whose devices choose among so many models, and train by the recipe ``local``."""

    def train(
        self,
        models: Tensor,
        start: NDArray[np.int64],
        block: Block,
        orders: Sequence[Shuffler],
        local: LocalTraining,
        round_: int,
    ) -> Trained:
        """Train every device of ``block`` from the model that ``start`` names.

        Args:
            models: thetas, shape (k, d), float32.
            start: shape (c,), rows of ``models``.
            block: c devices.
            orders: each device's source of batch orders.
            local: length, step size and the rest, exactly as `edge_client.learning.training.train` reads them.
            round_: counted from 1, for the step size decay.

        Raises:
            DivergedError: a loss or an update is no longer finite.
        """


def devices_within(floats: int, length: int, most: int) -> int:
    """Return how many vectors of ``length`` fit into ``floats``: at least 1, at most ``most``."""
    return max(1, min(most, floats // length))


def step_size(local: LocalTraining, round_: int) -> float:
    """Return the step size of a round, counted from 1, rounded to float32 as on a device."""
    return float(np.float32(local.lr * local.lr_decay ** (round_ - 1)))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The mini-batches of a block, step by step, devices with the most steps first.

    Attributes:
        by_steps: places in the block in that order, shape (c,), int64.
        rows: sample rows within the device, shape (steps, c, b), int64; padding points to row 0.
        weights: 1 / batch length, 0 for padding, shape (steps, c, b), float32.
        active: devices that still train, the first so many, by step, shape (steps,).
        visited: samples visited by each device over all steps, shape (c,), in the order of ``by_steps``.
    """

    by_steps: NDArray[np.int64]
    rows: Tensor
    weights: Tensor
    active: NDArray[np.int64]
    visited: NDArray[np.int64]


def schedule(
    lengths: NDArray[np.int64], local: LocalTraining, orders: Sequence[Shuffler], device: torch.device
) -> Schedule:
    """Return the mini-batches of devices with ``lengths`` (c,) samples."""
    passes = -(-lengths // np.minimum(local.batch_size, lengths))
    steps = local.epochs * passes if local.epochs else np.full(len(lengths), local.steps, np.int64)
    # Devices with the most steps first: those that still train are then a prefix of the block at every step.
    by_steps = np.argsort(-steps, kind="stable")
    width = int(min(local.batch_size, lengths.max()))
    rows = np.zeros((int(steps.max()), len(lengths), width), np.int64)
    weights = np.zeros(rows.shape, np.float32)
    visited = np.zeros(len(lengths), np.int64)
    for column, place in enumerate(by_steps.tolist()):
        n, per_pass = int(lengths[place]), int(passes[place])
        # As `edge_client.learning.training.batches`, but a whole pass at a time; its last batch may be shorter than the others.
        size = min(local.batch_size, n)
        order, weight = np.zeros(per_pass * size, np.int64), np.zeros(per_pass * size, np.float32)
        weight[:n] = np.float32(1.0) / np.float32(size)
        weight[(per_pass - 1) * size : n] = np.float32(1.0) / np.float32(n - (per_pass - 1) * size)
        for at in range(0, int(steps[place]), per_pass):
            take = min(per_pass, int(steps[place]) - at)
            order[:n] = orders[place].permutation(n)  # a new permutation for each epoch, as on a device
            rows[at : at + take, column, :size] = order.reshape(per_pass, size)[:take]
            weights[at : at + take, column, :size] = weight.reshape(per_pass, size)[:take]
            visited[column] += min(n, take * size)
    active = (steps[:, None] > np.arange(len(rows))[None, :]).sum(0)
    return Schedule(by_steps, torch.from_numpy(rows).to(device), torch.from_numpy(weights).to(device), active, visited)


class DivergedError(TaskError):
    """Losses or updates of devices are no longer finite.

    Attributes:
        rows: places of these devices in the block, (r,), int64.
    """

    def __init__(self, rows: NDArray[np.int64]) -> None:
        super().__init__("a simulated device's training diverged", hint="lower the learning rate, or set clip")
        self.rows = rows


def check_losses(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``losses`` (c,).

    Raises:
        DivergedError: one is not finite.
    """
    lost = np.flatnonzero(~np.isfinite(losses))
    if len(lost):
        raise DivergedError(lost)
    return losses


def without_diverged(
    parts: Iterable[NDArray[np.int64]], work: Callable[[NDArray[np.int64]], _T]
) -> tuple[list[_T], list[int]]:
    """Do the work of each part, again without the devices whose training diverges; return the results and these devices' places.

    Args:
        parts: places of the devices of a block each.
        work: trains them before it has any effect.
    """
    done: list[_T] = []
    lost: list[int] = []
    waiting = list(parts)
    while waiting:
        part = waiting.pop(0)
        try:
            done.append(work(part))
        except DivergedError as error:
            lost += part[error.rows].tolist()
            waiting += [rest] if len(rest := np.delete(part, error.rows)) else []
    return done, lost
