"""The personal finish of a device: make the candidates one after another, and keep the one that the rule prefers.

`edge_client.learning.personal` has the names and the rule, `edge_client.run.finishing` decides when a device does this. No
more than the leader so far and the candidate under way are in memory. A chosen model that the device has trained is trained
again in the same way, with the validation samples beside the training samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_client.learning import training
from edge_client.learning.data import joined
from edge_client.learning.personal import (
    ALONE,
    CLUSTER,
    DITTO,
    EPOCHS,
    FEWEST_PAIRS,
    alone_recipe,
    alone_rounds,
    choose,
    ditto_recipe,
    is_trained,
    one_epoch,
    preferred,
)
from edge_client.learning.scoring import sample_losses
from edge_client.learning.update import BatchOrder
from edge_client.models.fresh_start import TensorFigures, draw
from shoal.errors import TaskError
from shoal.task.manifest import LocalTraining

if TYPE_CHECKING:
    from edge_client.learning.data import Dataset, DataSplits
    from edge_client.learning.model import Backend
    from shoal.protocol.documents import LocalSettings, RunPlan
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
        lengths: of the task's tensors, which sum to d.
        start: figures of the model that the run began with; None if the device has none, so that it can't train alone.
        weight: of Ditto's proximal term; 0 leaves that candidate out.
    """

    plan: RunPlan
    device: str
    round: int
    own: Float32Vector
    above: Mapping[str, Float32Vector]
    lengths: tuple[int, ...]
    start: TensorFigures | None
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of a personal finish.

    Attributes:
        choice: name of the chosen candidate; theta: its model, shape (d,), float32.
        losses: mean validation loss of each candidate in order, which may not be finite.
        samples: size of the validation share.
    """

    choice: str
    theta: Float32Vector
    losses: Mapping[str, float]
    samples: int


def finish(ended: Ended, shares: DataSplits, backend: Backend, cancelled: Callable[[], bool]) -> Chosen:
    """Train the candidates, choose one by the validation share, and train it again with the validation samples too.

    A candidate whose training diverges is left out. The first training counts if the second diverges, or if the same test prefers
    the first one's model. With fewer than `FEWEST_PAIRS` validation samples no other can be chosen, so none is trained.

    Args:
        ended: the run.
        shares: the device's samples. The second training copies the training and the validation share.
        backend: computes the task's losses and gradients.
        cancelled: called before every step of training and every sample that is scored.

    Raises:
        Cancelled: ``cancelled()`` returned true.
        TaskError: the cluster's model can't be scored.
    """
    share = shares.validation
    losses = {CLUSTER: sample_losses(ended.own, share, backend, cancelled)}
    leader = CLUSTER, ended.own
    labels = np.issubdtype(share.y.dtype, np.integer)
    for name, theta in _candidates(ended, shares.train, backend, cancelled) if len(share) >= FEWEST_PAIRS else ():
        losses[name] = sample_losses(theta, share, backend, cancelled)
        if choose(losses, labels=labels) == name:
            leader = name, theta
    choice, theta = leader
    if is_trained(choice):
        training_again = _Candidates(ended, joined(shares.train, shares.validation), backend, cancelled)
        for name, again in _unless_diverged(training_again.of(choice), "the chosen one with the validation samples"):
            if name != choice:
                continue
            second = sample_losses(again, share, backend, cancelled)
            if not preferred(second, losses[choice], labels=labels):
                theta = again
    return Chosen(choice, theta, {name: float(each.mean()) for name, each in losses.items()}, len(share))


def _candidates(
    ended: Ended, batch: Dataset, backend: Backend, cancelled: Callable[[], bool]
) -> Iterator[tuple[str, Float32Vector]]:
    """Yield all candidates but the cluster's model, in the order of `shoal.simulation.engine.personal.candidates`."""
    trained = _Candidates(ended, batch, backend, cancelled)
    yield from _unless_diverged(trained.further(max(EPOCHS)), "epochs on top")
    yield from ended.above.items()
    if ended.weight:
        yield from _unless_diverged(trained.ditto(), DITTO)
    if ended.start is not None:
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
        """Train the cluster's model for ``epochs`` more."""
        ended, theta = self._ended, self._ended.own
        for epoch in range(1, epochs + 1):
            theta = self._trained(theta, one_epoch(ended.plan.local), ended.round + epoch - 1, ended.plan.rounds)
            if epoch in EPOCHS:
                yield str(epoch), theta

    def ditto(self) -> Iterator[tuple[str, Float32Vector]]:
        """Train Ditto's personal model."""
        ended = self._ended
        recipe = ditto_recipe(ended.plan.local, ended.weight)
        yield DITTO, self._trained(ended.own, recipe, ended.round, ended.plan.rounds)

    def alone(self) -> Iterator[tuple[str, Float32Vector]]:
        """Train a model from a fresh start."""
        ended, plan = self._ended, self._ended.plan
        assert ended.start is not None
        theta = draw(ended.start, ended.lengths, plan.seed)
        for round_ in range(1, alone_rounds(plan.local, plan.rounds) + 1):
            theta = self._trained(theta, alone_recipe(plan.local), round_, round_ - 1)
        yield ALONE, theta

    def _trained(self, theta: Float32Vector, recipe: LocalSettings, orders: int, round_: int) -> Float32Vector:
        ended = self._ended
        order = BatchOrder(ended.plan, ended.device, orders)
        local = LocalTraining.of(recipe)
        found = training.train(theta, self._batch, local, self._backend, order, round_, self._cancelled)
        return theta + found.delta


def _unless_diverged(made: Iterator[tuple[str, Float32Vector]], what: str) -> Iterator[tuple[str, Float32Vector]]:
    try:
        yield from made
    except TaskError as error:
        LOG.warning("personal finish: a candidate is left out", extra={"kv": {"candidate": what, "reason": error}})
