"""The trainers by name, and the rule that decides which one trains a network.

The first of `TRAINERS` that can train the network does: `dual` trains stacks of linear layers, `conv` a CNN, and `loop` anything.
The rule reads the network alone, never a clock or the load of a machine, so that a run that is repeated or resumed has the same
bits. Within `dual`, a device's number of samples decides on the form of the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from shoal.errors import UsageError
from shoal.simulation.trainers.blocks import Shelf, Trainer
from shoal.simulation.trainers.conv import Convolved
from shoal.simulation.trainers.dense import is_dense
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Network

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
    for make in TRAINERS.values() if name == "auto" else [TRAINERS[name]]:
        trainer = make(network, shelf)
        if trainer is not None:
            return trainer
    raise UsageError(f"trainer {name} can't train a {type(network).__name__}", hint="take trainer auto or loop")
