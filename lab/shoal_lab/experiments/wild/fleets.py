"""A fleet's data, network and local training, as `images` and `tables` make them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.protocol.recipe import DEFAULTS, LocalTraining
from shoal.simulation.api.standardisation import declaration, scales_of
from shoal.simulation.data import Population
from shoal.simulation.trainers.networks import Network
from shoal.task.data_declaration import DataDeclaration


def in_units(population: Population, network: Network, local: LocalTraining) -> Fleet:
    """Return a fleet whose devices standardise by statistics of features, as with `--standardise federated`."""
    declared = declaration(population, "federated", network.length)
    if declared is None:
        population = population.scaled(scales_of(population, "federated", DEFAULTS.weight_cap))
    return Fleet(population=population, network=network, local=local, declared=declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The devices of one scenario under one seed.

    Attributes:
        population: every device's data; a device of group `scenarios.NO_GROUP` is faulty.
        later: the data in the second half of the run; None if they stay the same.
        network: the network that devices train; local: their recipe.
        declared: bounds of the features, if devices standardise by statistics in the run; None if the data are in scale.
    """

    population: Population
    network: Network
    local: LocalTraining
    later: Population | None = None
    declared: DataDeclaration | None = None

    @property
    def last(self) -> Population:
        """The data at the end of the run."""
        return self.population if self.later is None else self.later
