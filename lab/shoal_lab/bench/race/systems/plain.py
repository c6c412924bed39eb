"""Federated averaging in plain torch: one device after another, autograd and an optimiser, and a running sum of the models."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shoal_lab.bench.race.systems.models import accuracy, given, module
from shoal_lab.bench.race.tasks import Turns


def main() -> None:
    """Train the rounds."""
    work, rounds = given()
    model = module(work)
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(work.x, work.y, strict=True)]
    turns = Turns()
    theta = parameters_to_vector(model.parameters()).detach()
    for _ in range(rounds):
        turns.begin()
        total = torch.zeros_like(theta)
        for x, y in data:
            # A copy, since the parameters become views of what they are given.
            vector_to_parameters(theta.clone(), model.parameters())
            optimiser = torch.optim.SGD(model.parameters(), work.task.lr)
            for rows in torch.split(torch.randperm(len(x)), work.task.batch):
                optimiser.zero_grad()
                functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            total += parameters_to_vector(model.parameters()).detach()
        theta = total / len(data)
        vector_to_parameters(theta.clone(), model.parameters())
        turns.trained()
    turns.tested(accuracy(model, work))


if __name__ == "__main__":
    main()
