"""The baseline in which each device trains alone (Ghosh et al., section 6.2: the local model scheme).

Nothing leaves a device, so there is no mask, and no round waits for another device: each block of devices is trained to
the end before the next one begins. Full-batch training of one hidden layer stays in its dual form for the whole run,
W1 = W1(0) - lr S^T X with S the sum of all the hidden layer's errors, so that a step costs n x n x hidden and not
n x inputs x hidden. Any other network runs through the simulator's strategy ``local``, a few devices at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.ranks import as_one, current_ranks
from shoal.simulation.engine.simulate import simulate
from shoal.simulation.engine.threads import limited_threads
from shoal.simulation.trainers.networks import Network, OneHidden, origins, sample_losses, unflatten
from shoal_lab.experiments.common.paper import paper_options

BLOCK_BYTES: Final = 2 << 20
"""Most memory of a block's kernels and activations in the dual form: the caches' size, since every step reads them."""
BLOCK_DEVICES: Final = 8
"""Devices per block if their whole models are in memory."""

Told = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Alone:
    """Results of m devices that trained alone.

    Attributes:
        accuracies: percent of correct labels on each device's test images, shape (m,), float64; NaN without any.
        losses: mean training loss at the end, shape (m,), float64.
        seconds_cpu: of training this rank's devices, without tests.
    """

    accuracies: NDArray[np.float64]
    losses: NDArray[np.float64]
    seconds_cpu: float

    @classmethod
    def of_none(cls) -> Self:
        """Return the results of no devices."""
        return cls(np.empty(0), np.empty(0), 0.0)


def train_alone(
    population: Population,
    network: Network,
    local: LocalTraining,
    *,
    rounds: int,
    seed: int,
    told: Told | None = None,
    threads: int = 1,
) -> Alone:
    """Train each device alone for ``rounds`` rounds from the same first model, and test each.

    A device is tested on all probes of its true group if the population has probes, else on its own test samples. Each rank
    trains some of the devices.

    Args:
        population: the devices.
        network: the network that they train.
        local: recipe of one round.
        rounds: number of rounds.
        seed: seed of the first model and of the order of batches.
        told: called with the number of devices of this rank that are done.
        threads: threads of one matrix product.
    """
    ranks = current_ranks()
    parts = ranks.parts(population.samples)
    mine = parts[ranks.rank]
    with as_one(), limited_threads(threads):
        found = _train_some(population, mine, network, local, rounds, seed, told) if len(mine) else Alone.of_none()
    table = ranks.rows(np.column_stack((found.accuracies, found.losses)), parts)
    return Alone(table[:, 0], table[:, 1], found.seconds_cpu)


def _train_some(
    population: Population,
    mine: NDArray[np.int64],
    network: Network,
    local: LocalTraining,
    rounds: int,
    seed: int,
    told: Told | None,
) -> Alone:
    """Train and test the devices at ``mine`` (c,): see `train_alone`."""
    start = origins(network, 1, seed)
    some, tests = population.of(mine), _tests(population)
    # The dual form below does plain gradient descent only; other recipes go through the simulator.
    full_batch = local.batch_size == 0 and not (local.momentum or local.clip or local.prox_mu)
    if isinstance(network, OneHidden) and full_batch and local.lr_decay == 1:
        blocks = _dual_blocks(some, network, torch.from_numpy(start[0]), local.steps * rounds, local.lr)
    else:
        blocks = _whole_blocks(some, network, local, rounds, seed, start)
    accuracies, losses, spent_s = np.empty(len(mine)), np.empty(len(mine)), 0.0
    begin_s = time.process_time()
    for place, theta in blocks:
        spent_s += time.process_time() - begin_s  # training happens inside the iterator; tests are not counted
        params = unflatten(network, theta)
        losses[place] = _score(network, params, some.train[place])[0]
        accuracies[place] = _score(network, params, tests[int(mine[place])])[1]
        if told is not None:
            told(place + 1)
        begin_s = time.process_time()
    return Alone(accuracies, losses, spent_s)


def _tests(population: Population) -> Sequence[Shard]:
    """Return each device's test samples: all probes of its group, which may have none, or its own if there are no probes."""
    if not population.probes or population.groups is None or population.probe_groups is None:
        return population.test
    by_group = {
        g: Shard(np.concatenate([s.x for s in shards]), np.concatenate([s.y for s in shards]))
        for g in set(population.groups)
        if (shards := [s for s, h in zip(population.probes, population.probe_groups, strict=True) if h == g])
    }
    return [by_group.get(g, Shard.none()) for g in population.groups]


def _score(network: Network, params: Sequence[Tensor], shard: Shard) -> tuple[float, float]:
    """Return mean loss and percent of right labels on ``shard``; NaN if it is empty."""
    if not len(shard):
        return math.nan, math.nan
    loss, right, rows = 0.0, 0, 5000
    with torch.no_grad():
        for at in range(0, len(shard), rows):
            x, y = torch.from_numpy(shard.x[at : at + rows]), torch.from_numpy(shard.y[at : at + rows])
            losses, correct = sample_losses(network.kind, network.forward(params, x), y)
            loss, right = loss + float(losses.double().sum()), right + int(correct.sum())
    return loss / len(shard), 100.0 * right / len(shard)


def _whole_blocks(
    population: Population, network: Network, local: LocalTraining, rounds: int, seed: int, start: NDArray[np.float32]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each device's place and final theta (d,), trained by the strategy ``local``."""
    options = paper_options(rounds=rounds, local=local, seed=seed, evaluate_every=0, threads=torch.get_num_threads())
    for begin in range(0, len(population), BLOCK_DEVICES):
        some = slice(begin, begin + BLOCK_DEVICES)
        block = Population(population.train[some], names=population.names[some])
        thetas = simulate("local", {}, block, network, options, start=start).thetas
        for model in sorted(thetas):
            yield begin + model, torch.from_numpy(thetas[model])


def _dual_blocks(
    population: Population, network: OneHidden, start: Tensor, steps: int, lr: float
) -> Iterator[tuple[int, Tensor]]:
    """Yield each device's place and final theta (d,) after ``steps`` full-batch steps, in blocks of equal shards."""
    begin = 0
    while begin < len(population):
        n = len(population.train[begin])
        most = max(1, BLOCK_BYTES // (4 * n * (n + 4 * network.hidden)))
        end = begin
        while end < len(population) and end - begin < most and len(population.train[end]) == n:
            end += 1
        x = torch.from_numpy(np.stack([s.x for s in population.train[begin:end]]))
        y = torch.from_numpy(np.stack([s.y for s in population.train[begin:end]]))
        with torch.no_grad():
            yield from enumerate(dual_descent(network, start, x, y, steps, lr), begin)
        begin = end


def dual_descent(network: OneHidden, start: Tensor, x: Tensor, y: Tensor, steps: int, lr: float) -> Tensor:
    """Return models (c, d) after full-batch gradient descent on each of c devices.

    With X the samples of a device and E(q) the errors at its hidden layer in step q, W1(q) = W1(0) - lr S(q)^T X and
    b1(q) = b1(0) - lr S(q)^T 1 where S(q) = E(0) + ... + E(q-1). The hidden layer therefore sees
    X W1(0)^T + b1(0) - lr (X X^T + 1) S(q): neither W1 nor X is touched before the end.

    Args:
        network: one hidden layer.
        start: theta (d,), float32, of all devices.
        x: shape (c, n, inputs), float32.
        y: shape (c, n), int64.
        steps: how many.
        lr: step size.
    """
    w1, b1, w2_start, b2_start = unflatten(network, start)
    c, n, _ = x.shape
    kernel = torch.baddbmm(torch.ones(1, 1, 1), x, x.transpose(1, 2))
    first = torch.addmm(b1, x.reshape(c * n, -1), w1.T).view(c, n, -1)
    w2, b2 = w2_start.repeat(c, 1, 1), b2_start.repeat(c, 1)
    wanted = torch.nn.functional.one_hot(y, network.classes).float()
    errors = torch.zeros_like(first)
    for _ in range(steps):
        hidden = torch.baddbmm(first, kernel, errors, alpha=-lr).relu_()
        outputs = torch.baddbmm(b2[:, None], hidden, w2.transpose(1, 2))
        wrong = torch.softmax(outputs, 2).sub_(wanted).mul_(1.0 / n)
        back = torch.bmm(wrong, w2).mul_(hidden > 0)
        w2.baddbmm_(wrong.transpose(1, 2), hidden, alpha=-lr)
        b2.sub_(wrong.sum(1), alpha=lr)
        errors.add_(back)
    w1_end = torch.baddbmm(w1.expand(c, -1, -1), errors.transpose(1, 2), x, alpha=-lr)
    b1_end = b1 - lr * errors.sum(1)
    return torch.cat([p.reshape(c, -1) for p in (w1_end, b1_end, w2, b2)], 1)
