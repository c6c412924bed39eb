"""The torch modules of the race."""

import numpy as np
import pytest
import torch
from shoal_lab.bench.race.systems.models import accuracy, module
from shoal_lab.bench.race.systems.shoal_simulator import network
from shoal_lab.bench.race.tasks import TASKS
from torch import nn

from shoal.simulation.trainers.networks import unflatten

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", TASKS)
def test_the_module_is_the_simulators_network_at_the_tasks_start(work_file, name):
    _, work = work_file(name)
    own = network(work.task)
    x = torch.from_numpy(work.x_test[:5])
    with torch.no_grad():
        expected = own.forward(unflatten(own, torch.from_numpy(work.theta)), x)
        torch.testing.assert_close(module(work)(x), expected, rtol=1e-4, atol=1e-5)


def test_a_trained_module_leaves_the_start_alone(work_file):
    _, work = work_file("logistic")
    before = work.theta.copy()
    model = module(work)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    np.testing.assert_array_equal(work.theta, before)


def test_accuracy_is_the_share_of_right_labels(work_file):
    _, work = work_file("logistic")

    class Says(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot(torch.full((len(x),), 3), 10)

    assert accuracy(Says(), work) == pytest.approx((work.y_test == 3).mean())
