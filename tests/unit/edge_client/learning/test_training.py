"""Local training against torch's optimiser, and its failure modes."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from edge_client.learning.data import Dataset
from edge_client.learning.model import OrtModel
from edge_client.learning.training import FIRST_STEP, Cancelled, LocalTraining, train
from shoal.errors import TaskError
from tests.helpers.tasks import logistic_bundle, samples


@pytest.fixture(scope="module")
def backend():
    return OrtModel(logistic_bundle())


@pytest.fixture
def theta0():
    return (0.3 * np.random.default_rng(4).standard_normal(15)).astype(np.float32)


@pytest.fixture(scope="module")
def batch():
    return Dataset(*samples(43, seed=8))


def run(theta0, batch, backend, round_=0, **settings):
    return train(theta0, batch, LocalTraining(**settings), backend, np.random.default_rng(6), round_, lambda: False)


def test_first_loss_is_logged_once(theta0, batch, backend, caplog):
    """The first loss is logged once and at level debug."""
    with caplog.at_level(logging.DEBUG, "shoal.edge"):
        run(theta0, batch, backend, epochs=2, batch_size=10)
    (said,) = caplog.records
    assert (said.levelno, said.message) == (logging.DEBUG, FIRST_STEP)
    order = np.random.default_rng(6).permutation(43)[:10]
    assert said.kv == {"loss": backend.grad(theta0, batch.x[order], batch.y[order])[0]}


def torch_reference(theta0, batch, s, round_):
    """The same run with torch.optim.SGD and clip_grad_norm_; mini-batches from an equal numpy generator."""
    import torch
    from torch.nn import functional

    theta = torch.from_numpy(theta0.copy()).requires_grad_()
    start = theta.detach().clone()
    optimiser = torch.optim.SGD([theta], lr=s.lr * s.lr_decay**round_, momentum=s.momentum)
    rng, n, orders = np.random.default_rng(6), len(batch), []
    if s.batch_size == 0:
        orders = [np.arange(n)] * s.steps
    else:
        for _ in range(s.epochs or 1000):
            order = rng.permutation(n)
            orders += [order[at : at + s.batch_size] for at in range(0, n, s.batch_size)]
        orders = orders if s.epochs else orders[: s.steps]
    losses = []
    for rows in orders:
        x, y = torch.from_numpy(batch.x[rows]), torch.from_numpy(batch.y[rows])
        plain = functional.cross_entropy(x @ theta[:12].view(4, 3) + theta[12:], y)
        losses += [plain.item()] * len(rows)
        optimiser.zero_grad()
        (plain + s.prox_mu / 2 * ((theta - start) ** 2).sum()).backward()
        if s.clip:
            torch.nn.utils.clip_grad_norm_([theta], s.clip)
        optimiser.step()
    return (theta.detach() - start).numpy(), float(np.mean(losses)), len(orders)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("settings", "round_"),
    [
        ({"epochs": 3, "batch_size": 10, "lr": 0.2}, 0),
        ({"epochs": 2, "batch_size": 10, "lr": 0.1, "momentum": 0.9}, 0),
        ({"epochs": 2, "batch_size": 7, "lr": 0.3, "prox_mu": 1.0}, 0),
        ({"epochs": 2, "batch_size": 7, "lr": 0.3, "clip": 0.05}, 0),
        ({"epochs": 2, "batch_size": 7, "lr": 0.3, "clip": 0.2, "prox_mu": 0.5, "momentum": 0.5, "lr_decay": 0.9}, 4),
        ({"epochs": 0, "steps": 12, "batch_size": 0, "lr": 0.5}, 0),
        ({"epochs": 0, "steps": 11, "batch_size": 10, "lr": 0.1}, 0),
        ({"epochs": 1, "batch_size": 1000, "lr": 0.1}, 0),
    ],
)
def test_matches_torch_sgd(theta0, batch, backend, settings, round_):
    expected, loss, steps = torch_reference(theta0, batch, LocalTraining(**settings), round_)
    result = run(theta0, batch, backend, round_, **settings)
    assert result.steps == steps
    assert result.mean_loss == pytest.approx(loss, rel=1e-5)
    assert result.delta.dtype == np.float32
    np.testing.assert_allclose(result.delta, expected, rtol=1e-4, atol=2e-6)


def test_the_given_model_is_not_modified(theta0, batch, backend):
    before = theta0.copy()
    run(theta0, batch, backend, epochs=1, momentum=0.5, prox_mu=0.1)
    np.testing.assert_array_equal(theta0, before)


def test_zero_epochs_report_the_loss(theta0, batch, backend):
    """Zero epochs change nothing and report the loss."""
    result = run(theta0, batch, backend, epochs=0)
    assert result.steps == 0
    assert not result.delta.any()
    assert result.mean_loss == backend.score(theta0, batch.x, batch.y).mean_loss


def test_cancelling_stops_before_next_step(theta0, batch, backend):
    answers = iter([False, False, True])
    asked = []

    def cancelled():
        asked.append(1)
        return next(answers)

    with pytest.raises(Cancelled):
        train(theta0, batch, LocalTraining(epochs=9), backend, np.random.default_rng(0), 0, cancelled)
    assert len(asked) == 3


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_error_of_a_divergence_has_a_hint(theta0, batch, backend, momentum):
    """A proximal pull of lr * mu = 1e6 a step overflows float32 within a few steps."""
    with pytest.raises(TaskError) as caught:
        run(theta0, batch, backend, epochs=20, lr=1e3, prox_mu=1e3, momentum=momentum)
    assert "learning rate" in caught.value.hint


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_last_step_to_infinity_is_caught(theta0, batch, backend):
    """At theta = 0 the loss is log 3 for every x, but lr times a gradient of 1e33 is beyond float32."""
    far = Dataset(batch.x * np.float32(3e34), batch.y)
    with pytest.raises(TaskError, match="not finite") as caught:
        run(theta0 * 0, far, backend, epochs=0, steps=1, batch_size=0, lr=1e6)
    assert "learning rate" in caught.value.hint
