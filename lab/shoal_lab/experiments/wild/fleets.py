"""A fleet's data, network and local training, as `images`, `tables` and `natural` make them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population
from shoal.simulation.trainers.networks import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The devices of one scenario under one seed.

    Attributes:
        population: every device's data; a device of group `scenarios.NO_GROUP` is faulty.
        later: the data in the second half of the run; None if they stay the same.
        network: the network that devices train; local: their recipe.
    """

    population: Population
    network: Network
    local: LocalTraining
    later: Population | None = None

    @property
    def last(self) -> Population:
        """The data at the end of the run."""
        return self.population if self.later is None else self.later
