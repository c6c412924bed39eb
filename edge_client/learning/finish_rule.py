"""The personal finish: the models that a device compares after a run, and the rule that picks one.

Candidates are the model of its cluster, that model after more local epochs, the models above it in cfl's tree, Ditto's
personal model if a weight is given, and a model trained alone. They are compared on the validation share, or if that is small,
by cross-validation on all samples but the test share's. The best of several models on few samples is often best by chance, so
the device keeps the cluster's model unless labels are `LEAST_RATIO` times as likely under another, or a paired test on squared
errors prefers another. By the same test it leaves the best model that has learned from the fleet for the one trained alone. A
chosen model that the device trains is then trained again, with all these samples.

`edge_client.learning.finish` uses these functions, on devices and in the simulator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.recipe import LocalTraining

CLUSTER: Final = "cluster"
"""Name of the candidate that is the model of the device's cluster."""
EPOCHS: Final = (1, 3, 10)
"""Local epochs on top of the cluster's model after which the result is a candidate, named after their number."""
DITTO: Final = "ditto"
"""Name of the candidate that is trained with a pull towards the cluster's model."""
ALONE: Final = "alone"
"""Name of the candidate that is trained on the device's own samples only, from a fresh start."""
MOST_ALONE_EPOCHS: Final = 1000
"""Most epochs of the model that is trained alone; more passes over the few samples of one device only fit them closer."""
FEWEST_PAIRS: Final = 2
"""Fewest samples of a paired test."""
FEWEST_HELD_OUT: Final = 20
"""Fewest validation samples on which candidates are compared; with fewer they are compared by cross-validation."""
FOLDS: Final = 5
"""Parts of the samples in cross-validation: each candidate is trained as often, on four fifths of them."""
MOST_SHRUNK: Final = 64
"""Times by which the step size of the epochs on top may shrink."""
LEAST_RATIO: Final = len(EPOCHS) + 1
"""Least ratio of the likelihoods of the validation labels under another model and under the cluster's.

If the cluster's model is as probable in advance as the models that every device trains (these epochs, and alone) together, a
ratio of their number makes one of them as probable as the cluster's model."""

_NODE: Final = "node-"


def node_name(node: int) -> str:
    """Return the name of the candidate that is a model above the device's own in cfl's tree."""
    return f"{_NODE}{node}"


def node_of(name: str) -> int | None:
    """Return the node of a candidate that `node_name` named; None for other candidates."""
    number = name.removeprefix(_NODE)
    return int(number) if number != name and number.isdecimal() else None


def is_trained(name: str) -> bool:
    """Return whether a candidate is one that the device trains, and not a model of the fleet."""
    return name != CLUSTER and node_of(name) is None


def clearly_better(own: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Return whether the paired test prefers ``other`` to ``own``.

    With gains g_i = own_i - other_i it does if mean(g) > 0 and mean(g) >= s / sqrt(n), where s is the standard
    deviation of the gains (n - 1 degrees of freedom). Losses that are not finite are worse than all that are.

    Args:
        own: loss of each validation sample, shape (n,), float64.
        other: losses of the same samples by another model, shape (n,), float64.
    """
    if len(own) < FEWEST_PAIRS or not np.isfinite(other).all():
        return False
    if not np.isfinite(own).all():
        return True
    gains = own - other
    mean = float(gains.mean())
    return mean > 0 and mean >= float(gains.std(ddof=1)) / math.sqrt(len(gains))


def smoothed(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the losses if no label were less probable than n samples can show: of (p + 1/n) / (1 + 1/n) for p.

    Otherwise one mistake of a model that is too sure of itself outweighs all that it has right. A loss that is not finite is of
    p = 0.

    Args:
        losses: negative log-likelihood of each sample's label, shape (n,), float64.
    """
    least = 1 / len(losses)
    found: NDArray[np.float64] = np.log1p(least) - np.log(np.where(np.isfinite(losses), np.exp(-losses), 0.0) + least)
    return found


def preferred(own: NDArray[np.float64], other: NDArray[np.float64], *, labels: bool) -> bool:
    """Return whether ``other`` is to replace ``own``.

    For labels it is if these are at least `LEAST_RATIO` times as likely by `smoothed` losses: the logarithm of the ratio is the
    sum of the gains, in nats. Otherwise it is if ``other`` is `clearly_better`.

    Args:
        own: loss of each sample, shape (n,), float64.
        other: losses of the same samples by another model, shape (n,), float64.
        labels: as for `choose`.
    """
    if not labels or not np.isfinite(other).all():
        return clearly_better(own, other)
    return float((smoothed(own) - smoothed(other)).sum()) >= math.log(LEAST_RATIO)


def choose(losses: Mapping[str, NDArray[np.float64]], *, labels: bool) -> str:
    """Return the name of the model that the device keeps.

    It is the one with the least mean loss, `smoothed` for labels, among the cluster's model and those preferred to it, the first
    of several; but the one trained alone only if it is preferred to the best of the others.

    Args:
        losses: loss of each sample, shape (n,), by candidate in order; `CLUSTER` is one of them.
        labels: whether the task predicts labels, so that losses are negative log-likelihoods (for a sequence, means over its
            positions). Squared errors have no such unit.
    """
    own, mean_of = losses[CLUSTER], smoothed if labels else np.asarray
    better = [n for n, other in losses.items() if n not in (CLUSTER, ALONE) and preferred(own, other, labels=labels)]
    best = min(better, key=lambda name: float(mean_of(losses[name]).mean()), default=CLUSTER)
    return ALONE if ALONE in losses and preferred(losses[best], losses[ALONE], labels=labels) else best


def one_epoch(local: LocalTraining) -> LocalTraining:
    """Return a run's recipe for one epoch on top of the cluster's model; a recipe that counts steps keeps their number.

    It has no proximal term: FedProx's pulls towards the model of a round, and no round is left.
    """
    own = dataclasses.replace(local, prox_mu=0.0)
    return dataclasses.replace(own, epochs=1, steps=0) if _counts_epochs(local) else own


def ditto_recipe(local: LocalTraining, weight: float) -> LocalTraining:
    """Return the recipe of Ditto's personal model, which starts at the cluster's model w* and is trained as long as the others.

    Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization" (2021), objective 2:
    min_v F(v) + weight / 2 |v - w*|^2.
    """
    most = max(EPOCHS)
    own = dataclasses.replace(local, prox_mu=weight)
    if _counts_epochs(local):
        return dataclasses.replace(own, epochs=most, steps=0)
    return dataclasses.replace(own, steps=most * local.steps)


def alone_recipe(local: LocalTraining) -> LocalTraining:
    """Return a run's recipe for one round of the model that is trained alone: without a proximal term."""
    return dataclasses.replace(local, prox_mu=0.0)


def alone_rounds(local: LocalTraining, rounds: int) -> int:
    """Return how many rounds the model is trained alone: those of the run, up to `MOST_ALONE_EPOCHS` epochs."""
    each = local.epochs if _counts_epochs(local) else 1
    return min(rounds, max(1, MOST_ALONE_EPOCHS // each))


def _counts_epochs(local: LocalTraining) -> bool:
    return bool(local.epochs and local.batch_size)
