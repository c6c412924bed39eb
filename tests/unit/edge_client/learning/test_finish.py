"""A device's personal finish: its candidates, their order and recipes, and how it is cancelled."""

import dataclasses
import logging

import numpy as np
import pytest

from edge_client.learning.data import Dataset, joined, split
from edge_client.learning.finish import Ended, finish, sample_losses
from edge_client.learning.model import OrtModel
from edge_client.learning.training import Cancelled, train
from edge_client.learning.update import BatchOrder
from edge_client.models.fresh_start import draw, figures_of
from shoal.errors import TaskError
from shoal.protocol.recipe import LocalTraining
from tests.helpers.plans import run_plan
from tests.helpers.tasks import CLASSES, INPUTS, logistic_bundle, samples

D = INPUTS * CLASSES + CLASSES
LENGTHS = (INPUTS * CLASSES, CLASSES)
MINI = LocalTraining(epochs=2, batch_size=5, lr=0.3, lr_decay=0.9)
ORIGIN = np.random.default_rng(3).standard_normal(D).astype(np.float32) * np.float32(0.1)


def never():
    return False


@pytest.fixture(scope="module")
def backend(logistic):
    return OrtModel(logistic(INPUTS, CLASSES))


@pytest.fixture(scope="module")
def shares():
    x, _ = samples(120)
    concept = np.random.default_rng(5).standard_normal((INPUTS, CLASSES))
    return split(Dataset(x, (x @ concept).argmax(1)), b"seed")


def fresh():
    return draw(figures_of(ORIGIN, LENGTHS), LENGTHS, 9)


def ended(**changes):
    fields = {
        "plan": run_plan(local=MINI, rounds=6),
        "device": "dev-1",
        "round": 7,
        "own": ORIGIN,
        "above": {},
        "fresh": fresh,
    }
    return Ended(**{**fields, **changes})


def test_candidates_are_compared_in_order(shares, backend):
    done = finish(ended(above={"node-0": ORIGIN}, weight=0.5), shares, backend, never)
    assert list(done.losses) == ["cluster", "1", "3", "10", "node-0", "ditto", "alone"]
    assert done.samples == len(shares.validation) == 24
    assert done.losses["node-0"] == done.losses["cluster"]
    assert sorted(done.losses, key=done.losses.get)[:2] == ["alone", done.choice], "alone is not four times as likely"


@pytest.mark.parametrize("choice", ["10", "ditto", "alone"])
def test_chosen_model_is_trained_once_more(shares, backend, monkeypatch, choice):
    """By the recipe of the candidate; the losses reported are those of the first training, which has not seen them."""
    monkeypatch.setattr(
        "edge_client.learning.finish.choose", lambda losses, **_: choice if choice in losses else "cluster"
    )
    done = finish(ended(weight=0.1), shares, backend, never)
    both = joined(shares.train, shares.validation)
    more = finish(ended(weight=0.1), dataclasses.replace(shares, train=both), backend, never)
    assert done.choice == choice
    assert done.losses[choice] != more.losses[choice]
    assert sample_losses(done.theta, shares.validation, backend).mean() == more.losses[choice]


class Spoilt:
    """A backend whose gradients are others after the ten epochs on top."""

    def __init__(self, shares, spoil):
        self.real, self.shares, self.spoil = OrtModel(logistic_bundle(INPUTS, CLASSES)), shares, spoil
        self.left = 10 * -(-len(shares.train) // MINI.batch_size)

    def score(self, theta, x, y):
        return self.real.score(theta, x, y)

    def grad(self, theta, x, y):
        self.left -= 1
        return self.real.grad(theta, x, y) if self.left >= 0 else self.spoil(self, theta, x, y)


def diverges(_backend, theta, _x, _y):
    return float("nan"), np.zeros_like(theta)


def climbs(backend, theta, x, y):
    loss, gradient = backend.real.grad(theta, x, y)
    return loss, -20 * gradient


def forgets(backend, theta, _x, _y):
    return backend.real.grad(theta, backend.shares.validation.x, backend.shares.validation.y)


@pytest.mark.parametrize("spoil", [diverges, climbs, forgets])
def test_spoilt_second_training_leaves_first(shares, backend, spoil):
    """Without figures of the start nothing is trained alone."""
    done = finish(ended(fresh=None), shares, Spoilt(shares, spoil), never)
    assert list(done.losses) == ["cluster", "1", "3", "10"]
    assert done.choice == "10"
    assert sample_losses(done.theta, shares.validation, backend).mean() == done.losses["10"]


def test_cluster_model_is_not_trained_again(shares, backend, monkeypatch):
    monkeypatch.setattr(
        "edge_client.learning.finish.choose", lambda losses, **_: "node-0" if "node-0" in losses else "cluster"
    )
    above = ORIGIN * 2
    assert finish(ended(above={"node-0": above}), shares, backend, never).theta is above
    monkeypatch.setattr("edge_client.learning.finish.choose", lambda _, **__: "cluster")
    assert finish(ended(), shares, backend, never).theta is ORIGIN


def test_candidates_are_trained_as_the_run(shares, backend):
    """Epochs on top one at a time, with the step size of the round after the last and the orders of later rounds.

    Alone: the rounds of the run. Ditto: objective 2 of the paper, one training from w*, with the gradient of
    weight / 2 |v - w*|^2 added.
    """
    told = ended(weight=2.0)

    def after(theta, recipe, round_, order):
        batches = BatchOrder(told.plan, "dev-1", order)
        return theta + train(theta, shares.train, recipe, backend, batches, round_, never).delta

    on_top, alone = ORIGIN, told.fresh()
    for order in (7, 8, 9):
        on_top = after(on_top, dataclasses.replace(MINI, epochs=1), 6, order)
    for round_ in range(1, 7):
        alone = after(alone, MINI, round_ - 1, round_)
    ditto = after(ORIGIN, dataclasses.replace(MINI, epochs=10, prox_mu=2.0), 6, 7)
    done = finish(told, shares, backend, never)
    expected = {"3": on_top, "alone": alone, "ditto": ditto}
    losses = {name: sample_losses(theta, shares.validation, backend).mean() for name, theta in expected.items()}
    assert losses == {name: done.losses[name] for name in expected}


def few(shares, count=12):
    """Return the shares with fewer validation samples than candidates are compared on."""
    return dataclasses.replace(shares, validation=Dataset(shares.validation.x[:count], shares.validation.y[:count]))


def test_few_samples_are_scored_crosswise(backend):
    """Labels by chance: whoever has seen a sample knows its label, and no one else does better than a guess."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((30, INPUTS)).astype(np.float32)
    told = split(Dataset(x, rng.integers(0, CLASSES, 30)), b"seed")
    done = finish(ended(), told, backend, never)
    whole = joined(told.train, told.validation)
    assert list(done.losses) == ["cluster", "1", "3", "10", "alone"]
    assert (done.samples, done.folds) == (len(whole), 5) == (24, 5)
    assert done.losses["cluster"] == sample_losses(ORIGIN, whole, backend).mean()
    assert min(done.losses["10"], done.losses["alone"]) > np.log(CLASSES)
    learned = finish(dataclasses.replace(ended(), own=fresh()), told, backend, never)
    assert learned.losses["alone"] == done.losses["alone"]


@pytest.mark.parametrize("choice", ["10", "ditto", "alone"])
def test_crossed_choice_trains_on_all(shares, backend, monkeypatch, choice):
    """After cross validation the chosen model is trained on all samples."""
    told = few(shares)
    monkeypatch.setattr("edge_client.learning.finish.choose", lambda _, **__: choice)
    done = finish(ended(weight=0.5), told, backend, never)
    whole = joined(told.train, told.validation)
    more = finish(ended(weight=0.5), dataclasses.replace(shares, train=whole), backend, never)
    assert (done.choice, more.choice) == (choice, choice)
    assert sample_losses(done.theta, shares.validation, backend).mean() == more.losses[choice]


def test_order_of_labels_does_not_matter(shares, backend):
    """Folds of neighbours would each hold a label that the others lack."""
    whole = joined(shares.train, shares.validation)
    order = np.argsort(whole.y, kind="stable")[::2]
    told = dataclasses.replace(
        shares,
        train=Dataset(whole.x[order[:-12]], whole.y[order[:-12]]),
        validation=Dataset(whole.x[order[-12:]], whole.y[order[-12:]]),
    )
    assert finish(ended(), told, backend, never).choice != "cluster"


def test_a_device_with_two_samples_finishes(shares, backend):
    told = few(dataclasses.replace(shares, train=Dataset(shares.train.x[:1], shares.train.y[:1])), 1)
    done = finish(ended(), told, backend, never)
    assert (done.choice, done.samples) == ("cluster", 2)


def test_model_above_may_be_chosen(shares, backend):
    """A model above may be chosen by cross validation."""
    above = finish(ended(), shares, backend, never).theta
    done = finish(ended(above={"node-0": above}, fresh=None), few(shares), backend, never)
    assert done.losses["node-0"] < done.losses["1"] < done.losses["cluster"]
    assert done.theta is above or done.choice != "node-0"


def test_epochs_on_top_never_raise_the_loss(shares, backend):
    """A step size that one device's model can't bear is halved until it can."""
    hot = run_plan(local=dataclasses.replace(MINI, lr=500.0), rounds=6)
    settled = finish(ended(), shares, backend, never).theta
    done = finish(ended(plan=hot, own=settled, fresh=None), shares, backend, never)
    spoilt = train(
        settled, shares.train, dataclasses.replace(MINI, lr=500.0), backend, np.random.default_rng(1), 6, never
    )
    worst = sample_losses(settled + spoilt.delta, shares.validation, backend).mean()
    assert worst > 10 * done.losses["cluster"]
    assert all(loss < 2 * done.losses["cluster"] for loss in done.losses.values())


def test_candidate_that_diverges_is_left_out(shares, caplog):
    with caplog.at_level(logging.WARNING, "shoal.edge"):
        done = finish(ended(), shares, Spoilt(shares, diverges), never)
    assert list(done.losses) == ["cluster", "1", "3", "10"]
    assert caplog.records[0].kv["candidate"] == "alone"
    assert isinstance(caplog.records[0].kv["reason"], TaskError)


def test_infinite_loss_is_unusable(shares, backend):
    """A loss that is not finite counts as unusable."""

    class Overflowing:
        def score(self, theta, x, y):
            return dataclasses.replace(backend.score(theta, x, y), mean_loss=float("inf"))

    assert np.isnan(sample_losses(ORIGIN, shares.validation, Overflowing())).all()


@pytest.mark.parametrize("after", [0, 5, 40, 150])
def test_stops_before_the_next_step(shares, backend, after):
    """24 samples are scored, then there are 15 steps in an epoch."""
    calls = []

    def cancelled():
        calls.append(None)
        return len(calls) > after

    with pytest.raises(Cancelled):
        finish(ended(), shares, backend, cancelled)
    assert len(calls) == after + 1
