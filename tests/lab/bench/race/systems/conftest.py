"""One batch a round, so that a round of all devices is a step of gradient descent on all samples."""

import sys

import pytest
import torch
from shoal_lab.bench.race import tasks
from shoal_lab.bench.race.systems.models import accuracy, module
from shoal_lab.bench.race.tasks import Task
from torch.nn import functional

ROUNDS = 4
LR = 0.5


class Seen:
    """The program's end of the conversation, with a benchmark that asks for every round."""

    def __init__(self, **_):
        self.calls = []
        self.accuracy = None

    def begin(self):
        self.calls.append("begin")

    def trained(self):
        self.calls.append("trained")

    def tested(self, accuracy):
        self.calls.append("tested")
        self.accuracy = accuracy


@pytest.fixture
def seen():
    return Seen()


@pytest.fixture
def whole_batches(work_file, monkeypatch):
    """Return the file and the work of ``logistic`` with a batch of all samples of a device."""
    monkeypatch.setitem(tasks.TASKS, "logistic", Task("logistic", 30, LR))
    return work_file("logistic")


@pytest.fixture
def arguments(whole_batches, monkeypatch):
    """The command line of a program."""
    monkeypatch.setattr(sys, "argv", ["program", str(whole_batches[0]), "logistic", str(ROUNDS)])


@pytest.fixture
def expected(whole_batches):
    """The accuracy of gradient descent on all samples."""
    _, work = whole_batches
    model = module(work)
    x, y = torch.from_numpy(work.x).flatten(0, 1), torch.from_numpy(work.y).flatten()
    optimiser = torch.optim.SGD(model.parameters(), LR)
    assert accuracy(model, work) < 0.4
    for _ in range(ROUNDS):
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return accuracy(model, work)
