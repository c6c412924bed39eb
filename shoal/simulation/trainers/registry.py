"""The trainers by name, and the rule that decides which one trains a network.

The first of `TRAINERS` that fits the network does: `dual` trains stacks of linear layers, `conv` a CNN with few weights, and
`loop` anything. With more weights than `KERNEL_WEIGHTS` or `CNN_WEIGHTS` torch's own convolution in `loop` is faster. The rule
reads the network alone, never a clock or the load of a machine, so that a run that is repeated or resumed has the same bits.
Within `dual`, a device's number of samples decides on the form of the first layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from shoal.errors import UsageError
from shoal.simulation.trainers.blocks import Shelf, Trainer
from shoal.simulation.trainers.conv import Convolved
from shoal.simulation.trainers.dense import is_dense
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Network

KERNEL_WEIGHTS: Final = 4_000
"""Most weights of a convolution that `conv` trains unless it is asked for by name."""
CNN_WEIGHTS: Final = 300_000
"""Most parameters of a CNN that it trains then: the devices of a block each have their own, in the cache."""
TRAINERS: Final[Mapping[str, Callable[[Network, Shelf], Trainer | None]]] = {
    "dual": lambda network, shelf: Dual(network, shelf) if is_dense(network) else None,
    "conv": lambda network, _shelf: Convolved(network) if isinstance(network, Cnn) and network.filters else None,
    "loop": lambda network, _shelf: Loop(network),
}
"""Each returns the trainer of a network, or None where it can't train the network."""


def make_trainer(name: str, network: Network, shelf: Shelf) -> Trainer:
    """Return the trainer called ``name``, for devices whose training data is ``shelf``; "auto" follows the rule.

    Raises:
        UsageError: no such trainer, or one that can't train this network.
    """
    if name not in ("auto", *TRAINERS):
        raise UsageError(f"no trainer {name!r}", hint=f"there are auto, {', '.join(TRAINERS)}")
    if name == "auto" and isinstance(network, Cnn) and not _few_weights(network):
        name = "loop"
    for make in TRAINERS.values() if name == "auto" else [TRAINERS[name]]:
        trainer = make(network, shelf)
        if trainer is not None:
            return trainer
    raise UsageError(f"trainer {name} can't train a {type(network).__name__}", hint="take trainer auto or loop")


def _few_weights(network: Cnn) -> bool:
    """Return whether `conv` is faster than `loop`."""
    kernels = [math.prod(shape) for shape in network.shapes[: 2 * len(network.filters) : 2]]
    return max(kernels, default=0) <= KERNEL_WEIGHTS and network.length <= CNN_WEIGHTS
