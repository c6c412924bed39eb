"""The trainers by name, and the choice of the fastest one for a network, its data and a recipe."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.protocol.documents import LocalSettings
from shoal.simulation.trainers import dense
from shoal.simulation.trainers.batched import Batched
from shoal.simulation.trainers.blocks import Shelf, Trainer
from shoal.simulation.trainers.conv import Convolved
from shoal.simulation.trainers.costs import Work, fits, seconds
from shoal.simulation.trainers.dense import Dense
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Linear, Network
from shoal.simulation.trainers.stepwise import Stepwise

TRAINERS: Final = ("auto", "loop", "batched", "dual", "stepwise")


class Choice(Protocol):
    """Decides which trainer trains a group of devices."""

    def trainer(self, ids: NDArray[np.int64], local: LocalSettings, *, candidates: int = 1) -> Trainer:
        """Return the trainer for the devices at ``ids`` (c,).

        Args:
            ids: places of the devices in the shelf.
            local: the recipe.
            candidates: models that the devices choose from by their loss on the samples that they train on; 1 if they do not.
        """


class Fixed:
    """Always the same trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def trainer(self, _ids: NDArray[np.int64], _local: LocalSettings, *, candidates: int = 1) -> Trainer:  # noqa: ARG002
        """Return the trainer."""
        return self._trainer


class Fastest:
    """The trainer of a dense network that should take the least time by `costs.seconds`.

    The choice depends on sizes and recipe alone, not on measurements during a run, so a run that is repeated or resumed
    gives the same bits.

    Args:
        network: the network that devices train.
        shelf: all devices' training data.

    Attributes:
        trainers: those that can train the network, by name.
    """

    def __init__(self, network: Dense, shelf: Shelf) -> None:
        self.network, self.shelf = network, shelf
        self.trainers: dict[str, Trainer] = {"dual": Dual(network, shelf), "batched": Batched(network)}
        if not isinstance(network, Linear):
            self.trainers["stepwise"] = Stepwise(network)
        self._chosen: dict[tuple[bytes, LocalSettings, int], str] = {}

    def trainer(self, ids: NDArray[np.int64], local: LocalSettings, *, candidates: int = 1) -> Trainer:
        """Return the trainer that should be fastest."""
        return self.trainers[self.name(ids, local, candidates=candidates)]

    def name(self, ids: NDArray[np.int64], local: LocalSettings, *, candidates: int = 1) -> str:
        """Return the name of the trainer that should be fastest; see `Choice.trainer`."""
        sizes = np.sort(self.shelf.sizes[ids])
        key = (sizes.tobytes(), local, candidates)
        if key not in self._chosen:
            on_cpu = self.shelf.device.type == "cpu"
            names = [name for name in self.trainers if fits(name, self.network, sizes, local, on_cpu=on_cpu)]
            times = [seconds(name, self.work(name, ids, local, candidates)) for name in names]
            self._chosen[key] = names[int(np.argmin(times))]
        return self._chosen[key]

    def work(self, name: str, ids: NDArray[np.int64], local: LocalSettings, candidates: int) -> Work:
        """Count a trainer's work; see `Choice.trainer`."""
        blocks = self.shelf.parts(ids, *self.trainers[name].limits(candidates))
        return Work.of(self.network, [self.shelf.sizes[block] for block in blocks], local, scored=candidates > 1)


def make_trainers(name: str, network: Network, shelf: Shelf) -> Choice:
    """Return the trainers called ``name`` for devices whose training data is ``shelf``.

    Raises:
        UsageError: no such trainer, or one that can't train this network.
    """
    if name not in TRAINERS:
        raise UsageError(f"no trainer {name!r}", hint=f"there are {', '.join(TRAINERS)}")
    if name == "loop":
        return Fixed(Loop(network))
    if dense.is_dense(network):
        if name == "stepwise" and not isinstance(network, Linear):
            return Fixed(Stepwise(network))
        if name in ("batched", "dual"):
            return Fixed(Batched(network) if name == "batched" else Dual(network, shelf))
        return Fastest(network, shelf)
    if isinstance(network, Cnn) and network.filters and name not in ("dual", "stepwise"):
        return Fixed(Convolved(network))
    if name != "auto":
        raise UsageError(f"trainer {name} can't train a {type(network).__name__}", hint="take trainer auto or loop")
    return Fixed(Loop(network))
