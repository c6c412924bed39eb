"""The personal finish of a device: make the candidates one after another, and keep the one that the rule prefers.

`edge_client.learning.finish_rule` has the names and the rule, `edge_client.run.finishing` decides when a device does this. No
more than the leader so far and the candidate under way, with the epoch before, are in memory. A chosen model that the device
has trained is trained again in the same way, with the validation samples beside the training samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edge_client.learning import training
from edge_client.learning.data import Dataset, DataSplits, joined, permutation
from edge_client.learning.finish_rule import (
    ALONE,
    CLUSTER,
    DITTO,
    EPOCHS,
    FEWEST_HELD_OUT,
    FOLDS,
    MOST_SHRUNK,
    alone_recipe,
    alone_rounds,
    choose,
    ditto_recipe,
    is_trained,
    one_epoch,
)
from edge_client.learning.scoring import sample_losses
from edge_client.learning.update import BatchOrder
from shoal.errors import TaskError
from shoal.protocol.recipe import LocalTraining

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_client.learning.model import Backend
    from shoal.protocol.documents import RunPlan
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that has ended, as one device needs it for its personal finish.

    Attributes:
        plan: the run's plan.
        device: the device's name, of which the sample orders are a function.
        round: number of the final round.
        own: the model of the device's cluster, shape (d,), float32.
        above: the models above it in cfl's tree, each (d,) float32, by candidate from the root.
        fresh: makes the model (d,) from which the device trains alone; None if it can't.
        weight: of Ditto's proximal term; 0 leaves that candidate out.
    """

    plan: RunPlan
    device: str
    round: int
    own: Float32Vector
    above: Mapping[str, Float32Vector]
    fresh: Callable[[], Float32Vector] | None
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of a personal finish.

    Attributes:
        choice: name of the chosen candidate; theta: its model, shape (d,), float32.
        losses: mean loss of each candidate in order on samples that it was not trained on, which may not be finite.
        samples: number of samples on which candidates were compared; folds: parts that these were divided into for
            cross-validation, 0 if they are the validation share.
    """

    choice: str
    theta: Float32Vector
    losses: Mapping[str, float]
    samples: int
    folds: int


def finish(ended: Ended, shares: DataSplits, backend: Backend, cancelled: Callable[[], bool]) -> Chosen:
    """Train the candidates, choose one, and train it again with all samples but those of the test.

    Candidates are compared on the validation share; if that has fewer than `FEWEST_HELD_OUT` samples, on both shares, each sample
    by models that were trained without it. A candidate whose training diverges is left out. The chosen one's last training counts
    unless it diverges, or on all its samples has a larger mean loss than what the device has without it: the first training's
    model, or the cluster's.

    Args:
        ended: the run.
        shares: the device's samples. The last training copies the training and the validation share.
        backend: computes the task's losses and gradients.
        cancelled: called before every step of training and every sample that is scored.

    Raises:
        Cancelled: ``cancelled()`` returned true.
        TaskError: the cluster's model can't be scored.
    """
    share, labels = shares.validation, np.issubdtype(shares.validation.y.dtype, np.integer)
    few, folds = len(share) < FEWEST_HELD_OUT, 0
    if few:
        share = joined(shares.train, share)
        folds = min(FOLDS, len(share))
    losses = {CLUSTER: sample_losses(ended.own, share, backend, cancelled)}
    leader = CLUSTER, ended.own
    if few:
        losses |= _cross_validated(ended, share, folds, backend, cancelled)
    else:
        for name, theta in _candidates(ended, shares.train, backend, cancelled):
            losses[name] = sample_losses(theta, share, backend, cancelled)
            if choose(losses, labels=labels) == name:
                leader = name, theta
    choice = choose(losses, labels=labels)
    if few and choice in ended.above:
        leader = choice, ended.above[choice]
    if is_trained(choice):
        whole = share if few else joined(shares.train, share)
        training_again = _Candidates(ended, whole, backend, cancelled)
        for name, again in _unless_diverged(training_again.of(choice), "the chosen one with the validation samples"):
            if name == choice and training_again.loss(again) <= training_again.loss(leader[1]):
                leader = choice, again
    return Chosen(*leader, {name: float(each.mean()) for name, each in losses.items()}, len(share), folds)


def _cross_validated(
    ended: Ended, samples: Dataset, folds: int, backend: Backend, cancelled: Callable[[], bool]
) -> dict[str, NDArray[np.float64]]:
    """Return all candidates' losses but the cluster's model's, (n,) each: a sample's by a model that was trained on other folds.

    Samples are drawn for the folds, since files may hold one label after another. A loss is NaN where training diverged.
    """
    places = permutation(len(samples), f"{ended.plan.seed}/{ended.device}".encode()) % FOLDS
    losses: dict[str, NDArray[np.float64]] = {}
    for fold in range(folds):
        held = places == fold
        rest, out = Dataset(samples.x[~held], samples.y[~held]), Dataset(samples.x[held], samples.y[held])
        for name, theta in _candidates(ended, rest, backend, cancelled):
            losses.setdefault(name, np.full(len(samples), np.nan))[held] = sample_losses(theta, out, backend, cancelled)
    return losses


def _candidates(
    ended: Ended, batch: Dataset, backend: Backend, cancelled: Callable[[], bool]
) -> Iterator[tuple[str, Float32Vector]]:
    """Yield all candidates but the cluster's model, in order."""
    trained = _Candidates(ended, batch, backend, cancelled)
    yield from trained.further(max(EPOCHS))
    yield from ended.above.items()
    if ended.weight:
        yield from _unless_diverged(trained.ditto(), DITTO)
    if ended.fresh is not None:
        yield from _unless_diverged(trained.alone(), ALONE)


class _Candidates:
    """The candidates that a device trains on ``batch``, as (name, theta (d,) float32)."""

    def __init__(self, ended: Ended, batch: Dataset, backend: Backend, cancelled: Callable[[], bool]) -> None:
        self._ended = ended
        self._batch = batch
        self._backend = backend
        self._cancelled = cancelled

    def of(self, name: str) -> Iterator[tuple[str, Float32Vector]]:
        """Yield the candidate ``name`` last, after those that are trained on the way to it."""
        if name == DITTO:
            return self.ditto()
        return self.alone() if name == ALONE else self.further(int(name))

    def further(self, epochs: int) -> Iterator[tuple[str, Float32Vector]]:
        """Train the cluster's model for ``epochs`` more, at a step size that is halved until no epoch raises the training loss.

        Means of a round bear larger steps than one device's model. If the smallest step raises the loss too, the model stays.
        """
        ended, theta, recipe = self._ended, self._ended.own, one_epoch(self._ended.plan.local)
        least, loss = recipe.lr / MOST_SHRUNK, self.loss(theta)
        for epoch in range(1, epochs + 1):
            while recipe.lr >= least:
                with suppress(TaskError):
                    tried = self._trained(theta, recipe, ended.round + epoch - 1, ended.plan.recipe.rounds)
                    if (found := self.loss(tried)) <= loss:
                        theta, loss = tried, found
                        break
                recipe = replace(recipe, lr=recipe.lr / 2)
            if epoch in EPOCHS:
                yield str(epoch), theta

    def ditto(self) -> Iterator[tuple[str, Float32Vector]]:
        """Train Ditto's personal model."""
        ended = self._ended
        recipe = ditto_recipe(ended.plan.local, ended.weight)
        yield DITTO, self._trained(ended.own, recipe, ended.round, ended.plan.recipe.rounds)

    def alone(self) -> Iterator[tuple[str, Float32Vector]]:
        """Train a model from a fresh start."""
        ended, plan = self._ended, self._ended.plan
        assert ended.fresh is not None
        theta = ended.fresh()
        for round_ in range(1, alone_rounds(plan.local, plan.recipe.rounds) + 1):
            theta = self._trained(theta, alone_recipe(plan.local), round_, round_ - 1)
        yield ALONE, theta

    def loss(self, theta: Float32Vector) -> float:
        """Return the mean loss of a model (d,) on the samples; infinity if it is not finite."""
        found = self._backend.score(theta, self._batch.x, self._batch.y).mean_loss
        return found if math.isfinite(found) else math.inf

    def _trained(self, theta: Float32Vector, recipe: LocalTraining, orders: int, round_: int) -> Float32Vector:
        ended = self._ended
        order = BatchOrder(ended.plan, ended.device, orders)
        trained = training.train(theta, self._batch, recipe, self._backend, order, round_, self._cancelled).delta
        trained += theta
        return trained


def _unless_diverged(made: Iterator[tuple[str, Float32Vector]], what: str) -> Iterator[tuple[str, Float32Vector]]:
    try:
        yield from made
    except TaskError as error:
        LOG.warning("personal finish: a candidate is left out", extra={"kv": {"candidate": what, "reason": error}})
