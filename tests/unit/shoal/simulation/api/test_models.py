"""Which network trains a module: a vectorised one where it computes the same, autograd everywhere else."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.errors import TaskError
from shoal.simulation.api.models import network_of, source_of
from shoal.simulation.trainers.modules import ModuleNetwork
from shoal.simulation.trainers.networks import Cnn, Linear, OneHidden, Softmax

pytestmark = pytest.mark.torch
CNN = nn.Sequential(
    nn.Conv2d(2, 3, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(48, 5),
    nn.ReLU(),
    nn.Linear(5, 4),
)


def chosen(model, task="classification", shape=(6,)):
    x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    y = np.zeros(3, np.float32 if task == "regression" else np.int64)
    return network_of(source_of(model, task, 0), x, y)


@pytest.mark.parametrize(
    ("model", "task", "shape", "network"),
    [
        (nn.Linear(6, 3), "classification", (6,), Softmax(6, 3)),
        (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(6, 3))), "classification", (2, 3), Softmax(6, 3)),
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), "classification", (6,), OneHidden(6, 5, 3)),
        (nn.Linear(6, 1, bias=False), "regression", (6,), Linear(6)),
        (nn.Linear(6, 1), "regression", (6,), Linear(6, bias=True)),
        (CNN, "classification", (2, 8, 8), Cnn(2, 8, 4, (3,), (5,), 3, True)),
    ],
)
def test_a_known_architecture_is_vectorised(model, task, shape, network):
    assert chosen(model, task, shape) == network


class Doubled(nn.Linear):
    """The parameters of a linear layer, and another function."""

    def forward(self, x):
        return 2 * super().forward(x)


STRIDED = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(48, 4))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Doubled(6, 3), (6,)),
        (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
        (nn.Linear(6, 3, bias=False), (6,)),
        (STRIDED, (2, 8, 8)),
    ],
    ids=["another forward", "another activation", "no bias", "another pooling of the same shapes"],
)
def test_any_other_trains_by_autograd(model, shape):
    """And computes what the module computes, at other parameters too."""
    network = chosen(model, shape=shape)
    assert isinstance(network, ModuleNetwork)
    x = torch.randn(4, *shape)
    params = [p.detach() for p in model.parameters()]
    with torch.no_grad():
        torch.testing.assert_close(network.forward(params, x), model(x))
        assert not torch.equal(network.forward([p + 1 for p in params], x), model(x))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(x + torch.randn_like(x))


def test_random_model_is_refused():
    """A model that draws random numbers is refused."""
    with pytest.raises(TaskError, match="random numbers"):
        chosen(Noisy())


def test_origins_of_an_instance():
    """One is its own weights; several are drawn again, and differ."""
    source = source_of(nn.Linear(6, 3), "classification", 0)
    own = torch.cat([p.detach().reshape(-1) for p in source.template.parameters()]).numpy()
    np.testing.assert_array_equal(source.origins(1, 0)[0], own)
    several = source.origins(2, 0)
    assert not np.array_equal(several[0], several[1])
    np.testing.assert_array_equal(several, source.origins(2, 0))


def test_origins_of_function_follow_the_seed():
    """A function that returns trained weights keeps them."""
    source = source_of(lambda: nn.Linear(6, 3), "classification", 0)
    np.testing.assert_array_equal(source.origins(2, 3), source.origins(2, 3))
    assert not np.array_equal(source.origins(1, 3), source.origins(1, 4))
    trained = nn.Linear(6, 3)
    fixed = source_of(lambda: trained, "classification", 0).origins(2, 3)
    np.testing.assert_array_equal(fixed[0], fixed[1])
