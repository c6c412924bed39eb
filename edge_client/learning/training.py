"""Local training: SGD on a device's own samples, in place in numpy, gradients from the backend.

One step, with g the mean gradient of a batch and w_t the round's first model (FedProx: Li et al., and FedGroup,
Duan et al., section II, whose local objective adds mu/2 |w - w_t|^2)::

    g <- g + mu (w - w_t)          proximal term
    g <- g min(1, clip / |g|)      global norm
    v <- momentum v + g
    w <- w - lr decay^round v
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from edge_client.learning.model import Backend, OwnTraining
from shoal.errors import ShoalError, TaskError
from shoal.protocol.recipe import LocalTraining

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_client.learning.data import Dataset
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")

__all__ = ["Cancelled", "LocalTraining", "TrainResult", "train"]

FIRST_STEP: Final = "first step of training"
"""Message that a training logs at level debug once its first loss is known; `shoal bench start` waits for it."""
_DIVERGED_HINT: Final = "lower the learning rate, or set clip; for large targets compile the task with --target"


class Shuffler(Protocol):
    """Returns a new sample order for each epoch of a local training; a numpy Generator is one."""

    def permutation(self, n: int, /) -> NDArray[np.int64]:
        """Return a permutation of 0..n-1, shape (n,), int64."""


class Cancelled(ShoalError):  # noqa: N818  # it is an outcome that the caller asked for, not a fault
    """Training stopped between two steps because the caller no longer wants the result."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of one local training.

    Attributes:
        delta: shape (d,), float32, theta_local - theta_0.
        mean_loss: mean over every sample visited, each at the step that visited it; with zero steps, the loss at
            theta_0.
        steps: gradient steps taken.
    """

    delta: Float32Vector
    mean_loss: float
    steps: int


def train(
    theta0: Float32Vector,
    batch: Dataset,
    settings: LocalTraining,
    backend: Backend,
    rng: Shuffler,
    round: int,  # noqa: A002  # the protocol's word
    cancelled: Callable[[], bool],
) -> TrainResult:
    """Train from ``theta0`` on the batch and return the change.

    Args:
        theta0: shape (d,), float32; not modified.
        batch: n >= 1 training samples.
        settings: the plan's settings for local training.
        backend: computes the task's gradient.
        rng: shuffles mini-batches; unused on full batches.
        round: 0-based, for the step size decay.
        cancelled: called before every step.

    Raises:
        Cancelled: ``cancelled()`` returned true.
        TaskError: loss, gradient or model is no longer finite.
    """
    if isinstance(backend, OwnTraining):
        now = replace(settings, lr=settings.lr * settings.lr_decay**round, lr_decay=1.0)
        theta, mean, steps = backend.train(theta0, batch.x, batch.y, now, seed=_seed(rng), cancelled=cancelled)
        return TrainResult(_finite(np.subtract(theta, theta0, out=theta)), mean, steps)
    lr = np.float32(settings.lr * settings.lr_decay**round)
    momentum, mu = np.float32(settings.momentum), np.float32(settings.prox_mu)
    theta, scratch = theta0.copy(), np.empty_like(theta0)
    velocity = np.zeros_like(theta0) if momentum else None
    total, seen, steps = 0.0, 0, 0
    for x, y in batches(batch, settings, rng):
        if cancelled():
            raise Cancelled("training was cancelled")
        loss, step = backend.grad(theta, x, y)
        if not steps:
            LOG.debug(FIRST_STEP, extra={"kv": {"loss": loss}})
        if not math.isfinite(loss):
            raise TaskError(f"the training loss became {loss} at step {steps + 1}", hint=_DIVERGED_HINT)
        if mu:
            np.subtract(theta, theta0, out=scratch)
            scratch *= mu
            step += scratch
        if settings.clip:
            _clip(step, settings.clip)
        if velocity is not None:
            velocity *= momentum
            velocity += step
            # In other memory: that of the gradient stays for the next one.
            theta -= np.multiply(velocity, lr, out=scratch)
        else:
            step *= lr
            theta -= step
        total += loss * len(x)
        seen += len(x)
        steps += 1
    delta = _finite(np.subtract(theta, theta0, out=theta))
    mean = total / seen if seen else backend.score(theta0, batch.x, batch.y).mean_loss
    return TrainResult(delta, mean, steps)


def _finite(delta: Float32Vector) -> Float32Vector:
    if not np.isfinite(delta).all():
        raise TaskError("the trained model holds numbers that are not finite", hint=_DIVERGED_HINT)
    return delta


def _seed(rng: Shuffler) -> int:
    """Return 32 bits for code that draws by itself: two places of an order of 2^16."""
    high, low = rng.permutation(1 << 16)[:2].tolist()
    return int(high << 16 | low)


def _clip(gradient: Float32Vector, most: float) -> None:
    """Scale ``gradient`` (d,) in place to L2 norm ``most`` if it is longer."""
    norm = math.sqrt(float(np.dot(gradient, gradient)))
    if not math.isfinite(norm):
        raise TaskError("a gradient's norm is not finite", hint="lower the learning rate")
    if norm > most:
        gradient *= np.float32(most / norm)


def batches(batch: Dataset, settings: LocalTraining, rng: Shuffler) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield the samples of each step; mini-batches share two buffers that the next step overwrites."""
    n, size = len(batch.x), min(settings.batch_size, len(batch.x))
    if size == 0:
        for _ in range(settings.steps):
            yield batch.x, batch.y
        return
    per_pass = -(-n // size)
    left = settings.epochs * per_pass if settings.epochs else settings.steps
    x = np.empty((size, *batch.x.shape[1:]), batch.x.dtype)
    y = np.empty((size, *batch.y.shape[1:]), batch.y.dtype)
    while left > 0:
        order = rng.permutation(n)
        for at in range(0, min(n, left * size), size):
            rows = order[at : at + size]
            # With the default mode "raise" numpy would buffer the output; the indices are in range.
            batch.x.take(rows, axis=0, out=x[: len(rows)], mode="clip")
            batch.y.take(rows, axis=0, out=y[: len(rows)], mode="clip")
            yield x[: len(rows)], y[: len(rows)]
            left -= 1
