"""Estimates of how long each trainer of dense networks takes, from which the fastest is chosen.

A trainer's time is a sum of a few terms: a fixed cost of every step of a block, one of every step of a device, multiplications,
and numbers read and written. `Work` counts them, `COSTS` has the nanoseconds of each, fitted to the times of several hundred
combinations of networks, samples, batches, recipes and fleets by `python -m shoal.bench.numerics.trainers`. Only ratios between
trainers matter, and these change less from one machine to another than the times do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.documents import LocalSettings
from shoal.simulation.trainers.dense import Dense
from shoal.simulation.trainers.dual import KERNEL_BYTES
from shoal.simulation.trainers.networks import OneHidden
from shoal.simulation.trainers.stepwise import KERNEL_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A round's training of some devices, in blocks, as counts.

    Attributes:
        inputs: of a sample; out: of the first layer; behind: weights after the first layer; length: coordinates of the model.
        blocks: number of blocks; devices: of all blocks.
        block_steps: steps of the blocks, each as many as its longest device takes.
        steps: steps of the devices; visits: samples in these steps, padding included.
        samples: of all devices, padding included; pairs: of samples of one device, for kernels, padding included.
        coefficients: samples of a device, summed over its steps: each of them may have moved the first layer.
        scored: whether the first layer's outputs are known from scoring.
        few: whether a device has few samples in units of the inputs; see `stepwise.KERNEL_RATIO`.
        gradients: whether each step forms the gradient, for momentum or clipping.
    """

    inputs: int
    out: int
    behind: int
    length: int
    blocks: int
    devices: int
    block_steps: int
    steps: int
    visits: int
    samples: int
    pairs: int
    coefficients: int
    scored: bool
    few: bool
    gradients: bool

    @classmethod
    def of(cls, network: Dense, blocks: Sequence[NDArray[np.int64]], local: LocalSettings, *, scored: bool) -> Self:
        """Count the work of devices with these numbers of samples, a block (c,) each."""
        out, inputs = network.shapes[0]
        totals = np.zeros(7, np.int64)
        for sizes in blocks:
            longest = int(sizes.max())
            if local.batch_size:
                width = min(local.batch_size, longest)
                steps = -(-sizes // np.minimum(local.batch_size, sizes)) * local.epochs if local.epochs else None
                steps = np.full(len(sizes), local.steps) if steps is None else steps
            else:
                width, steps = longest, np.full(len(sizes), local.steps)
            own = int(steps.sum())
            padded = longest * len(sizes)
            totals += (len(sizes), steps.max(), own, own * width, padded, longest * padded, longest * own)
        devices, block_steps, steps_, visits, samples, pairs, coefficients = totals.tolist()
        return cls(
            inputs=inputs,
            out=out,
            behind=network.hidden * network.classes if isinstance(network, OneHidden) else 0,
            length=network.length,
            blocks=len(blocks),
            devices=devices,
            block_steps=block_steps,
            steps=steps_,
            visits=visits,
            samples=samples,
            pairs=pairs,
            coefficients=coefficients,
            scored=scored,
            few=samples <= KERNEL_RATIO * inputs * devices,
            gradients=bool(local.momentum or local.clip),
        )


def batched(w: Work) -> Mapping[str, float]:
    """Count the terms of `Batched`."""
    return {
        "block": w.blocks,
        "block step": w.block_steps,
        "step": w.steps,
        "product": 2 * w.visits * w.inputs * w.out,
        "weights": w.steps * w.length * (2 if w.gradients else 1),
        "sample": w.visits * (w.inputs + w.out),
        "update": w.devices * w.length,
        "behind": w.visits * w.behind,
    }


def dual(w: Work) -> Mapping[str, float]:
    """Count the terms of `Dual`."""
    kept = 4 * w.pairs <= KERNEL_BYTES
    return {
        "block": w.blocks,
        "block step": w.block_steps,
        "step": w.steps,
        "product": (1 if w.scored else 2) * w.samples * w.inputs * w.out + (0 if kept else w.pairs * w.inputs),
        "kernel product": w.visits * w.coefficients / max(w.steps, 1) * w.out,
        "coefficients": w.coefficients * w.out,
        "sample": w.visits * (w.coefficients / max(w.steps, 1) + w.out),
        "behind": w.visits * w.behind,
        "tail": w.steps * w.behind,
    }


def stepwise(w: Work) -> Mapping[str, float]:
    """Count the terms of `Stepwise`."""
    shared = {"step": w.steps, "device": w.devices, "update": w.devices * w.length, "behind": w.visits * w.behind}
    if w.few:
        return shared | {
            "product": 2 * w.samples * w.inputs * w.out,
            "kernel product": w.visits * w.coefficients / max(w.steps, 1) * w.out,
            "sample": w.visits * (w.coefficients / max(w.steps, 1) + w.out),
        }
    return shared | {
        "product": 2 * w.visits * w.inputs * w.out,
        "weights": w.steps * w.length,
        "sample": w.visits * (w.inputs + w.out),
    }


TERMS: Final[Mapping[str, Callable[[Work], Mapping[str, float]]]] = {
    "batched": batched,
    "dual": dual,
    "stepwise": stepwise,
}
COSTS: Final[Mapping[str, Mapping[str, float]]] = {
    "batched": {
        "behind": 1.01,
        "block": 516_000.0,
        "block step": 88_900.0,
        "product": 0.029,
        "sample": 0.441,
        "step": 2_800.0,
        "update": 1.88,
        "weights": 0.391,
    },
    "dual": {
        "behind": 0.537,
        "block": 657_000.0,
        "block step": 87_300.0,
        "coefficients": 0.592,
        "kernel product": 0.0114,
        "product": 0.029,
        "sample": 1.89,
        "step": 3_030.0,
        "tail": 0.728,
    },
    "stepwise": {
        "behind": 0.864,
        "device": 153_000.0,
        "product": 0.0312,
        "sample": 0.998,
        "step": 17_400.0,
        "update": 0.906,
        "weights": 1.76,
    },
}
"""Nanoseconds of each term."""


def fits(name: str, network: Dense, sizes: NDArray[np.int64], local: LocalSettings, *, on_cpu: bool) -> bool:
    """Return whether a trainer can take this work at all, with kernels no larger than the data."""
    if name == "dual":
        return not local.clip and int(sizes.max()) <= network.shapes[0][1]
    if name == "stepwise":
        return on_cpu and local.batch_size > 0 and not local.momentum and not local.clip
    return True


def seconds(name: str, work: Work, costs: Mapping[str, Mapping[str, float]] | None = None) -> float:
    """Return how long a trainer should take for some work, on the machine that ``costs``, or `COSTS`, were measured on."""
    known = (COSTS if costs is None else costs)[name]
    return 1e-9 * sum(known.get(term, 0.0) * count for term, count in TERMS[name](work).items())
