"""The trainers by name, and which one is fastest for a network and its data."""

from __future__ import annotations

from typing import Final

from benchmarks.simulator import dense
from benchmarks.simulator.batched import Batched
from benchmarks.simulator.blocks import Shelf, Trainer
from benchmarks.simulator.conv import Convolved
from benchmarks.simulator.dual import Dual
from benchmarks.simulator.loop import Loop
from benchmarks.simulator.networks import Cnn, Linear, Network
from benchmarks.simulator.stepwise import Stepwise
from wire.errors import UsageError

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
