"""The baseline in which each device trains alone (Ghosh et al., section 6.2: the local model scheme).

Nothing leaves a device, so there is no mask, and no round waits for another device: each block of devices is trained to
the end before the next one begins. Plain full-batch descent of a dense network is one long training by the simulator's trainer,
whose dual form then lasts the whole run. Anything else runs through the simulator's strategy ``local``, a few devices at a time.
"""

from __future__ import annotations

import dataclasses
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
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.dense import Dense, is_dense
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.networks import Network, origins, sample_losses, unflatten
from shoal_lab.experiments.common.paper import paper_options

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
    # Momentum, the proximal term and the step size begin anew in each round.
    full_batch = local.batch_size == 0 and not (local.momentum or local.prox_mu)
    if is_dense(network) and full_batch and local.lr_decay == 1:
        blocks = _descended(some, network, dataclasses.replace(local, steps=local.steps * rounds), start)
    else:
        blocks = _whole_blocks(some, network, local, rounds, seed, start)
    accuracies, losses, spent_s = np.empty(len(mine)), np.empty(len(mine)), 0.0
    begin_s = time.process_time()
    for done, (place, theta) in enumerate(blocks, 1):
        spent_s += time.process_time() - begin_s  # training happens inside the iterator; tests are not counted
        params = unflatten(network, theta)
        losses[place] = _score(network, params, some.train[place])[0]
        accuracies[place] = _score(network, params, tests[int(mine[place])])[1]
        if told is not None:
            told(done)
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


def _descended(
    population: Population, network: Dense, local: LocalTraining, start: NDArray[np.float32]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each device's place and final theta (d,) after all steps of ``local`` from ``start`` (1, d)."""
    shelf, first = Shelf(population.train), torch.from_numpy(start)
    trainer = Dual(network, shelf)
    for part in shelf.parts(np.arange(len(shelf)), trainer.limits(1, local)):
        with torch.no_grad():
            moved = trainer.train(first, np.zeros(len(part), np.int64), shelf.block(part), (), local, 1).rows()
        yield from zip(part.tolist(), first + moved, strict=True)
