"""The rule of the personal finish: a model is left for another only if a paired test prefers that, and recipes for candidates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edge_client.learning import finish_rule as personal
from edge_client.learning.finish_rule import ALONE, CLUSTER, choose, clearly_better
from shoal.protocol.recipe import LocalTraining

EPOCHS = LocalTraining(epochs=2, batch_size=5, prox_mu=0.5)
STEPS = LocalTraining(epochs=0, steps=4, batch_size=0, prox_mu=0.5)
LOSSES = st.integers(2, 12).flatmap(
    lambda n: st.lists(arrays(np.float64, n, elements=st.floats(0, 100, width=32)), min_size=1, max_size=5)
)


def of(*values):
    return np.array(values, float)


@pytest.mark.parametrize(
    ("gains", "better"),
    [
        ([1, 1, 1], True),
        ([-1, -1, -1], False),
        ([0, 0, 0], False),
        ([3, -2, 0], False),
        ([3, 0, 1], True),
        ([5], False),
    ],
)
def test_gain_counts_from_one_standard_error(gains, better):
    """Gains 3, 0, 1 have the mean 1.33 and a standard error of 0.88; 3, -2, 0 have 0.33 and 1.45."""
    own = np.full(len(gains), 9.0)
    assert clearly_better(own, own - np.array(gains, float)) is better


def test_infinite_losses_are_the_worst():
    """Losses that are not finite are worse than all others."""
    better = [(of(1, np.nan), of(1, 50)), (of(np.inf, np.inf), of(1, 50))]
    worse = [(of(1, 50), of(0, np.nan)), (of(np.inf, 1), of(np.inf, 0))]
    assert [clearly_better(*pair) for pair in better + worse] == [True, True, False, False]


def alike(count, **losses):
    """Return losses that are the same for each of so many samples; ``n10`` is the candidate of ten epochs."""
    names = {"cluster": CLUSTER, "n10": "10", "alone": ALONE}
    return {names[name]: np.full(count, loss) for name, loss in losses.items()}


# A model of ten classes that guesses, and one that is right on eight of ten samples and very wrong on two: its mean is more.
GUESS, SURE = np.full(10, np.log(10)), np.array([0.01] * 8 + [20.0] * 2)


@pytest.mark.parametrize(
    ("losses", "labels", "choice"),
    [
        # The noisy candidate has the least mean and no clear gain; those of 1 and 3 epochs have the same mean.
        (
            {CLUSTER: of(2, 2, 2), "1": of(1, 1, 1), "3": of(1, 1, 1), "noisy": of(9, -9, 0), ALONE: of(3, 3, 3)},
            False,
            "1",
        ),
        (alike(3, cluster=2.0, alone=2.0), False, CLUSTER),
        (alike(1, cluster=2.0), False, CLUSTER),
        # Gains of .05 nats are a ratio of exp(.25) = 1.3 on five labels, and of exp(1.5) = 4.5 on thirty, smoothed of 4.3.
        *(
            (alike(n, cluster=0.15, n10=0.10), True, best)
            for n, best in ((5, CLUSTER), (28, CLUSTER), (29, "10"), (30, "10"))
        ),
        *((alike(n, cluster=0.15, n10=0.10), False, "10") for n in (5, 28, 29, 30)),
        ({CLUSTER: of(np.inf, np.nan, 9), "10": of(1, 1, 1)}, True, "10"),
        ({CLUSTER: of(9, 9, 9), "10": of(0, 0, np.nan)}, True, CLUSTER),
        ({CLUSTER: GUESS, ALONE: SURE}, True, ALONE),
        ({CLUSTER: SURE, ALONE: GUESS}, True, CLUSTER),
        # The cluster's model is far behind, and .05 nats on fifteen labels are a ratio of exp(.75) = 2.1.
        (alike(15, cluster=2.0, n10=0.45, alone=0.4), True, "10"),
        (alike(15, cluster=2.0, n10=0.45, alone=0.1), True, ALONE),
        (alike(15, cluster=2.0, n10=0.45), True, "10"),
    ],
)
def test_least_clearly_better_loss_wins(losses, labels, choice):
    """Labels have to be likelier by far, and one sure mistake decides nothing."""
    assert choose(losses, labels=labels) == choice


@given(st.lists(st.floats(0, 50) | st.sampled_from([np.inf, np.nan]), min_size=1, max_size=40))
def test_smoothing_bounds_and_keeps_order(values):
    """Smoothing bounds losses and keeps their order."""
    losses = np.array(values)
    found = personal.smoothed(losses)
    assert ((found >= -1e-12) & (found <= np.log(len(values) + 1) + 1e-12)).all()
    order = np.argsort(np.where(np.isfinite(losses), losses, np.inf), kind="stable")
    assert (np.diff(found[order]) >= -1e-12).all()


def test_clearly_better_model_is_preferred():
    """A model is preferred if it is clearly better or for labels likelier."""
    own, other, poor = np.full(5, 0.15), np.full(5, 0.10), np.full(5, 9.0)
    pairs = [(own, other, False), (own, other, True), (other, own, False), (poor, other, True)]
    assert [personal.preferred(a, b, labels=labels) for a, b, labels in pairs] == [True, False, False, True]


@given(LOSSES)
def test_choice_has_no_larger_mean_loss(losses):
    """The choice is the cluster's model or has a smaller mean loss."""
    named = {CLUSTER: losses[0], **{str(i): other for i, other in enumerate(losses[1:])}}
    choice = choose(named, labels=False)
    # Equal means: the mean of the gains may differ from their difference by a rounding error.
    assert choice == CLUSTER or named[choice].mean() <= named[CLUSTER].mean()
    for name, other in named.items():
        if name != CLUSTER and clearly_better(named[CLUSTER], other):
            assert named[choice].mean() <= other.mean()


@given(LOSSES, st.booleans())
def test_candidates_compare_one_by_one(losses, labels):
    """A device stores only the leader so far: the last leader is the choice."""
    named, leader = {CLUSTER: losses[0]}, CLUSTER
    for i, other in enumerate(losses[1:]):
        named[str(i)] = other
        now = choose(named, labels=labels)
        assert now in (leader, str(i))
        leader = now


@pytest.mark.parametrize(("name", "node"), [("node-7", 7), ("7", None), ("alone", None), ("node-x", None)])
def test_a_node_has_a_name(name, node):
    assert personal.node_of(name) == node
    assert personal.node_name(7) == "node-7"


def test_recipes_of_candidates():
    """One epoch at a time without a proximal term; Ditto's is as long as the longest; steps keep their number."""
    assert personal.one_epoch(EPOCHS) == LocalTraining(epochs=1, batch_size=5)
    assert personal.one_epoch(STEPS) == LocalTraining(epochs=0, steps=4, batch_size=0)
    ditto = personal.ditto_recipe(EPOCHS, 0.3)
    assert (ditto.epochs, ditto.steps, ditto.prox_mu) == (10, 0, 0.3)
    assert personal.ditto_recipe(STEPS, 0.3).steps == 40
    assert personal.alone_recipe(EPOCHS).prox_mu == 0
    assert personal.alone_recipe(EPOCHS).epochs == 2


@pytest.mark.parametrize(
    ("local", "rounds", "expected"), [(EPOCHS, 100, 100), (EPOCHS, 10_000, 500), (STEPS, 10_000, 1000), (STEPS, 1, 1)]
)
def test_training_alone_lasts_as_the_run(local, rounds, expected):
    """Training alone lasts as long as the run within a limit."""
    assert personal.alone_rounds(local, rounds) == expected


def test_small_limit_still_gives_a_round():
    """An epoch limit below one round still gives a round."""
    assert personal.alone_rounds(LocalTraining(epochs=5000, batch_size=5), 3) == 1
