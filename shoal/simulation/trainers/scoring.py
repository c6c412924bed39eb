"""Losses and correct answers of several models on many devices' samples, by one matrix product for all models if possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.simulation.trainers import dense
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.dense import Dense
from shoal.simulation.trainers.networks import Linear, Network, OneHidden, unflatten

CHUNK_FLOATS: Final = 4_000_000
"""Activations a chunk may hold (16 MB): larger ones cost memory and gain no speed."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How well each of k models fits each of c devices.

    Attributes:
        losses: mean over the device's samples, shape (c, k), float64.
        correct: labels predicted right, shape (c, k), int64; 0 for regression.
        tested: labels seen, shape (c,), int64.
    """

    losses: NDArray[np.float64]
    correct: NDArray[np.int64]
    tested: NDArray[np.int64]


def score(network: Network, models: Tensor, shelf: Shelf, ids: NDArray[np.int64]) -> Scores:
    """Score every model on the shards of every device.

    Args:
        network: the models' network.
        models: thetas, shape (k, d), float32.
        shelf: the share to score on.
        ids: places of c devices, shape (c,), none of them without samples.
    """
    with torch.no_grad():
        params = unflatten(network, models)
        shape = (len(ids), len(models))
        losses, correct = np.empty(shape), np.empty(shape, np.int64)
        tested = np.empty(len(ids), np.int64)
        at = 0
        for x, y, counts in _chunks(network, shelf, ids, len(models)):
            rows = slice(at, at + len(counts))
            per_label = y.numel() // max(len(y), 1)
            tested[rows] = counts * per_label
            values, right = _sample_scores(network, params, x, y)
            losses[rows], correct[rows] = _per_device(values, counts, means=True), _per_device(right, counts)
            at += len(counts)
    return Scores(losses, correct, tested)


def score_each(rows: NDArray[np.int64], score: Callable[[int, NDArray[np.int64]], Scores], models: int = 1) -> Scores:
    """Return scores (c, models) of devices with different models: ``score(row, mine)`` has those of one of the ``rows`` (c,)."""
    shape = (len(rows), models)
    found = Scores(np.empty(shape), np.empty(shape, np.int64), np.empty(len(rows), np.int64))
    for row in np.unique(rows):
        mine = np.flatnonzero(rows == row)
        part = score(int(row), mine)
        found.losses[mine], found.correct[mine], found.tested[mine] = part.losses, part.correct, part.tested
    return found


def sample_losses(network: Network, models: Tensor, shelf: Shelf, place: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the loss of every model (k, d) on each of the n samples of the device at ``place`` (1,), (k, n) float64."""
    with torch.no_grad():
        x, y, _ = next(_chunks(network, shelf, place, len(models)))
        losses: NDArray[np.float64] = (
            _sample_scores(network, unflatten(network, models), x, y)[0].T.double().cpu().numpy()
        )
    return losses


def choose(losses: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return each row's index of least loss, shape (c,), as `edge_client.learning.scoring.choose`: the lowest on ties.

    A NaN is chosen only if the whole row is NaN; then it is index 0.
    """
    usable = ~np.isnan(losses)
    least = np.where(usable, losses, np.inf).min(axis=1, keepdims=True)
    # Not argmin: with NaN taken for infinity, it would return a NaN's index if all other losses are infinite.
    best: NDArray[np.int64] = np.argmax(usable & (losses == least), axis=1)
    return best


def _chunks(
    network: Network, shelf: Shelf, ids: NDArray[np.int64], models: int
) -> Iterator[tuple[Tensor, Tensor, NDArray[np.int64]]]:
    """Yield the concatenated samples of some devices at a time: x, y, samples of each."""
    width = network.hidden * models if isinstance(network, OneHidden) else 1024
    most, sizes = max(256, CHUNK_FLOATS // width), shelf.sizes[ids]
    start, total = 0, 0
    for at in range(1, len(ids) + 1):
        total += int(sizes[at - 1])
        if at == len(ids) or total + int(sizes[at]) > most:
            x, y = shelf.joined(ids[start:at])
            yield x, y, sizes[start:at]
            start, total = at, 0


def _sample_scores(network: Network, params: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses (n, k) and right labels (n, k); dense networks' first layers are one product for all models."""
    count = len(params[0])
    if dense.is_dense(network):
        pre = preactivations(network, params, x)
        hidden = pre.relu_() if isinstance(network, OneHidden) else pre
        outputs = (behind(network, params, hidden[:, j], j) for j in range(count))
    else:
        outputs = (network.forward([p[j] for p in params], x) for j in range(count))
    pairs = [network.losses(o, y) for o in outputs]
    return torch.stack([a for a, _ in pairs], 1), torch.stack([b for _, b in pairs], 1)


def preactivations(network: Dense, params: list[Tensor], x: Tensor) -> Tensor:
    """Return the first layer's outputs of k models for x (n, inputs), shape (n, k, out)."""
    weight = params[0].flatten(0, 1)
    flat = torch.addmm(params[1].flatten(), x, weight.T) if dense.has_bias(network) else x @ weight.T
    return flat.view(len(x), len(params[0]), -1)


def behind(network: Dense, params: list[Tensor], hidden: Tensor, j: int) -> Tensor:
    """Return the outputs of model ``j`` of k from its first layer's activations (n, out), which are left alone."""
    if isinstance(network, OneHidden):
        return torch.addmm(params[3][j], hidden, params[2][j].T)
    return hidden.squeeze(1) if isinstance(network, Linear) else hidden


def _per_device(values: Tensor, counts: NDArray[np.int64], *, means: bool = False) -> NDArray[np.float64]:
    """Return sums, or means, of (n, k) over runs of ``counts`` (c,) rows: shape (c, k)."""
    rows = values.double().cpu().numpy()
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    sums: NDArray[np.float64] = np.add.reduceat(rows, starts, axis=0)
    return sums / counts[:, None] if means else sums
