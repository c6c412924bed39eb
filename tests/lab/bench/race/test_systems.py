"""The work that all systems do, and the programs of the race that need no environment of their own."""

import sys

import numpy as np
import pytest
import torch
from shoal_lab.bench.race import tasks
from shoal_lab.bench.race.systems import plain, shoal_simulator
from shoal_lab.bench.race.systems.models import accuracy, module
from shoal_lab.bench.race.systems.shoal_simulator import network
from shoal_lab.bench.race.tasks import TASKS, Task, Work
from torch import nn
from torch.nn import functional

from shoal.simulation.trainers.networks import unflatten

pytestmark = pytest.mark.torch
ROUNDS, LR = 4, 0.5


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("mlp", 159_010),
        ("logistic", 7850),
        ("cnn", 44_426),
        ("mlp-million", 1_001_710),
        ("cnn-wide", 545_098),
        ("transformer", 35_978),
    ],
)
def test_a_file_holds_all_of_a_tasks_work(work_file, name, length):
    """The module is the simulator's network at its start."""
    path, work = work_file(name)
    found, own = Work.load(path, name), network(work.task)
    assert (found.task, own.length, len(work.theta)) == (TASKS[name], length, length)
    assert (work.x.shape, work.x.dtype, work.y.dtype, work.theta.dtype) == (
        (10, 30, 3072 if work.task.coloured else 784),
        *(np.float32, np.int64, np.float32),
    )
    for part in ("x", "y", "x_test", "y_test", "theta"):
        np.testing.assert_array_equal(getattr(found, part), getattr(work, part))
    x = torch.from_numpy(work.x_test[:5])
    with torch.no_grad():
        expected = own.forward(unflatten(own, torch.from_numpy(work.theta)), x)
        torch.testing.assert_close(module(work)(x), expected, rtol=1e-4, atol=1e-5)


def test_work_follows_from_the_seed(work_file):
    first, again, other = (work_file("logistic", seed)[1] for seed in (0, 0, 1))
    for part in ("y", "theta"):
        np.testing.assert_array_equal(getattr(first, part), getattr(again, part))
        assert not np.array_equal(getattr(first, part), getattr(other, part))


def test_training_leaves_the_start_alone(work_file):
    _, work = work_file("logistic")
    before, model = work.theta.copy(), module(work)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    np.testing.assert_array_equal(work.theta, before)


def test_accuracy_is_share_of_right_labels(work_file):
    _, work = work_file("logistic")

    class Says(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot(torch.full((len(x),), 3), 10)

    assert accuracy(Says(), work) == pytest.approx((work.y_test == 3).mean())


class Seen:
    """The program's end of the conversation, with a benchmark that asks for every round."""

    def __init__(self, **_):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def trained(self):
        self.calls.append("trained")

    def tested(self, share):
        self.calls.append(share)


@pytest.mark.parametrize("system", [plain, shoal_simulator])
def test_one_batch_is_gradient_descent(work_file, monkeypatch, system):
    """On all samples of all devices."""
    monkeypatch.setitem(tasks.TASKS, "logistic", Task("logistic", 30, LR))
    path, work = work_file("logistic")
    seen, model = Seen(), module(work)
    monkeypatch.setattr(sys, "argv", ["program", str(path), "logistic", str(ROUNDS)])
    monkeypatch.setattr(system, "Turns", lambda: seen)
    system.main()
    x, y = torch.from_numpy(work.x).flatten(0, 1), torch.from_numpy(work.y).flatten()
    optimiser = torch.optim.SGD(model.parameters(), LR)
    for _ in range(ROUNDS):
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    *calls, found = seen.calls
    assert calls == ["begin", "trained"] * ROUNDS
    assert found == pytest.approx(accuracy(model, work), abs=0.011)
    assert found > 0.6
