"""What the programs share: their start, the models of the race as torch modules, and their accuracy."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal_lab.bench.race.tasks import Task, Work

TEST_BATCH = 1000


def given() -> tuple[Work, int]:
    """Return the work and the number of rounds that the command line names, and use one thread."""
    torch.set_num_threads(1)
    return Work.load(Path(sys.argv[1]), sys.argv[2]), int(sys.argv[3])


class Encoder(nn.Module):
    """A transformer's layer, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 64) for x (n, positions, 64)."""
        return self.layer(x).mean(1)  # type: ignore[no-any-return]


def layers(task: Task) -> nn.Module:
    """Return the task's model as torch initialises it."""
    made: list[nn.Module]
    if task.name == "cnn":
        made = [nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
        made += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        made += [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    elif task.name == "cnn-wide":
        made = [nn.Unflatten(1, (3, 32, 32)), nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        made += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        made += [nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10)]
    elif task.name == "transformer":
        made = [nn.Unflatten(1, (28, 28)), nn.Linear(28, 64), Encoder(), nn.Linear(64, 10)]
    elif task.name == "logistic":
        made = [nn.Linear(784, 10)]
    else:
        units = 200 if task.name == "mlp" else 1260
        made = [nn.Linear(784, units), nn.ReLU(), nn.Linear(units, 10)]
    return nn.Sequential(*made)


def module(work: Work) -> nn.Module:
    """Return the task's model at its starting point."""
    model = layers(work.task)
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
