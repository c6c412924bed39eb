"""Federated averaging in Shoal's simulator, without masks and limits, which the other systems do not have."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.utils import vector_to_parameters

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.api.models import network_of, source_of
from shoal.simulation.data import Population, shards_of
from shoal.simulation.engine.simulate import SimRound, simulate
from shoal.simulation.trainers.networks import Cnn, Network, OneHidden, Softmax
from shoal_lab.bench.race.systems.models import accuracy, given, layers, module
from shoal_lab.bench.race.tasks import Task, Turns
from shoal_lab.experiments.common.paper import paper_options


def network(task: Task) -> Network:
    """Return the task's model."""
    networks: dict[str, Network] = {
        "mlp": OneHidden(784, 200, 10),
        "logistic": Softmax(784, 10),
        "cnn": Cnn(),
        "mlp-million": OneHidden(784, 1260, 10),
        "cnn-wide": Cnn(channels=3, side=32, filters=(32, 64), dense=(128,), kernel=3, same=True),
    }
    if task.name in networks:
        return networks[task.name]
    return network_of(
        source_of(layers(task), "classification", 0), np.zeros((1, 784), np.float32), np.zeros(1, np.int64)
    )


def main() -> None:
    """Train the rounds."""
    (work, rounds), turns = given(), Turns()

    def ended(closed: SimRound) -> None:
        turns.trained()
        if closed.round < rounds:
            turns.begin()

    options = paper_options(
        rounds=rounds,
        local=LocalTraining(epochs=1, steps=0, batch_size=work.task.batch, lr=work.task.lr),
        evaluate_every=0,
    )
    population = Population(shards_of(work.x, work.y))
    turns.begin()
    done = simulate("fedavg", {}, population, network(work.task), options, ended, start=work.theta[None])
    (theta,) = done.thetas.values()
    model = module(work)
    vector_to_parameters(torch.from_numpy(theta), model.parameters())
    turns.tested(accuracy(model, work))


if __name__ == "__main__":
    main()
