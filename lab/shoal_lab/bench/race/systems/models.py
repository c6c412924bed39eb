"""What the programs share: their start, the models of the race as torch modules, and their accuracy."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from shoal_lab.bench.race.tasks import Work

TEST_BATCH = 1000


def given() -> tuple[Work, int]:
    """Return the work and the number of rounds that the command line names, and use one thread."""
    torch.set_num_threads(1)
    return Work.load(Path(sys.argv[1]), sys.argv[2]), int(sys.argv[3])


def module(work: Work) -> nn.Module:
    """Return the task's model at its starting point."""
    layers: list[nn.Module]
    if work.task.name == "cnn":
        layers = [nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        layers += [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    elif work.task.name == "mlp":
        layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)]
    else:
        layers = [nn.Linear(784, 10)]
    model = nn.Sequential(*layers)
    nn.utils.vector_to_parameters(torch.from_numpy(work.theta.copy()), model.parameters())
    return model


def accuracy(model: nn.Module, work: Work) -> float:
    """Return the share of test samples that the model gets right."""
    right = 0
    with torch.no_grad():
        for start in range(0, len(work.y_test), TEST_BATCH):
            part = slice(start, start + TEST_BATCH)
            found = model(torch.from_numpy(work.x_test[part])).argmax(1)
            right += int((found == torch.from_numpy(work.y_test[part])).sum())
    return right / len(work.y_test)
