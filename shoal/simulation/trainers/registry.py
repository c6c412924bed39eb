"""The trainers by name, and the choice of the fastest one for a network and its data."""

from __future__ import annotations

from typing import Final

from shoal.errors import UsageError
from shoal.simulation.trainers import dense
from shoal.simulation.trainers.batched import Batched
from shoal.simulation.trainers.blocks import Shelf, Trainer
from shoal.simulation.trainers.conv import Convolved
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Linear, Network
from shoal.simulation.trainers.stepwise import Stepwise

TRAINERS: Final = ("auto", "loop", "batched", "dual", "stepwise")


def make_trainer(name: str, network: Network, shelf: Shelf) -> Trainer:
    """Return the trainer called ``name`` for devices whose training data is ``shelf``.

    Raises:
        UsageError: no such trainer, or one that can't train this network.
    """
    if name not in TRAINERS:
        raise UsageError(f"no trainer {name!r}", hint=f"there are {', '.join(TRAINERS)}")
    if name == "loop":
        return Loop(network)
    if dense.is_dense(network):
        if name == "stepwise" and not isinstance(network, Linear):
            return Stepwise(network)
        return Batched(network) if name == "batched" else Dual(network, shelf, always=name == "dual")
    if isinstance(network, Cnn) and network.filters and name not in ("dual", "stepwise"):
        return Convolved(network)
    if name != "auto":
        raise UsageError(f"trainer {name} can't train a {type(network).__name__}", hint="take trainer auto or loop")
    return Loop(network)
