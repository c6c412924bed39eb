"""The simulator's local training against the plain loop and the sgemm ceiling, for `shoal bench numerics`.

The work is Rotated MNIST's: one hidden layer of 784-200-10, ten full-batch steps, all devices from one of four models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from edge_client.learning.training import Shuffler
from shoal.protocol.documents import LocalSettings
from shoal.simulation.data import shards_of
from shoal.simulation.trainers.blocks import Block, Shelf, Trained
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import OneHidden, origins
from shoal_lab.bench.numerics.kernel_result import KernelResult

NETWORK: Final = OneHidden(784, 200, 10)
STEPS: Final = 10
MODELS: Final = 4
RECIPE: Final = LocalSettings(
    epochs=0, steps=STEPS, batch_size=0, lr=0.1, lr_decay=1.0, momentum=0.0, clip=0.0, prox_mu=0.0
)
SGEMM_SIZE: Final = 2048
LOOP_DEVICES: Final = 12


def simulator(quick: bool) -> list[KernelResult]:
    """Return local training at n = 200, 100 and 50 samples a device; ``quick`` takes fewer devices and only two sizes.

    ``ceiling_ratio`` counts the plain form's operations, so that the dual form takes it past 1; ``naive_ratio`` is the
    plain loop's time in units of ours; ``n`` is a device's samples, ``seconds`` are of all devices measured.
    """
    sizes = [(200, 13), (50, 52)] if quick else [(200, 52), (100, 104), (50, 208)]
    results = []
    for samples, devices in sizes:
        seconds, ceiling, naive = measure_training(samples, devices, 3 if quick else 5)
        results.append(
            KernelResult(
                name="simulator", n=samples, d=NETWORK.length, seconds=seconds, ceiling_ratio=ceiling, naive_ratio=naive
            )
        )
    return results


def training_flops(devices: int, samples: int) -> float:
    """Return the operations of the plain form: forward and gradient of both layers, no gradient of the inputs."""
    first = 4 * samples * NETWORK.inputs * NETWORK.hidden
    second = 6 * samples * NETWORK.hidden * NETWORK.classes
    return float(STEPS * devices * (first + second))


def measure_training(samples: int, devices: int, runs: int = 3) -> tuple[float, float, float]:
    """Return (CPU seconds of all devices, speed in units of sgemm's, the loop's time in units of ours), on one thread.

    Ours trains ``devices`` and sums them up by model, as in a round of IFCA: X X^T is known from rounds before, the first
    layer's outputs from the scoring just done. The loop trains a few devices and is scaled up. Each piece takes the best
    of ``runs``, interleaved, so that a busy machine slows all alike.

    Args:
        samples: of each device.
        devices: m.
        runs: of every piece.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(samples, devices, runs)
    finally:
        torch.set_num_threads(before)


def _measure(samples: int, devices: int, runs: int) -> tuple[float, float, float]:
    rng = np.random.default_rng(0)
    x = rng.random((devices, samples, NETWORK.inputs), np.float32)
    y = rng.integers(0, NETWORK.classes, (devices, samples))
    shelf = Shelf(shards_of(x, y))
    models = torch.from_numpy(origins(NETWORK, MODELS, 0))
    start = np.arange(devices) * MODELS // devices
    dual, loop = Dual(NETWORK, shelf), Loop(NETWORK)
    blocks = [shelf.block(ids) for ids in shelf.parts(np.arange(devices), dual.limits(MODELS, RECIPE))]
    few = shelf.block(np.arange(min(LOOP_DEVICES, devices)))
    left, right = torch.rand(SGEMM_SIZE, SGEMM_SIZE), torch.rand(SGEMM_SIZE, SGEMM_SIZE)

    scored = [dual.score(models, block).of(start[block.ids]) for block in blocks]

    def ours() -> None:
        totals = torch.zeros_like(models)
        for block, pre in zip(blocks, scored, strict=True):
            chosen = start[block.ids]
            _add(dual.train(models, chosen, block, _orders(block), RECIPE, 1, pre.clone()), chosen, totals)

    def plain() -> None:
        chosen = start[few.ids]
        _add(loop.train(models, chosen, few, _orders(few), RECIPE, 1), chosen, torch.zeros_like(models))

    with torch.no_grad():
        ours()
        times = [(_cpu_s(lambda: torch.mm(left, right)), _cpu_s(ours), _cpu_s(plain)) for _ in range(runs)]
    sgemm_s, ours_s, plain_s = (min(column) for column in zip(*times, strict=True))
    speed = training_flops(devices, samples) / ours_s
    return ours_s, speed / (2.0 * SGEMM_SIZE**3 / sgemm_s), plain_s * devices / len(few.ids) / ours_s


def _orders(block: Block) -> list[Shuffler]:
    """Return batch orders, which full-batch training requires and does not use."""
    return [np.random.default_rng(0) for _ in block.ids]


def _add(trained: Trained, start: NDArray[np.int64], totals: torch.Tensor) -> None:
    for row in np.unique(start):
        trained.add_to(totals[int(row)], np.flatnonzero(start == row), None)


def _cpu_s(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
