"""The gradients of a network with one hidden layer, for many devices at once.

One step on a small batch equals `edge_client.learning.training` to float32 rounding; the unit test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.lab import CLASSES, LR, Lab

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Network:
    """An MLP with ReLU and cross entropy; vectors have the order of the built-in task: W1, b1, W2, b2.

    Attributes:
        pixels, hidden, classes: the sizes of its layers.
    """

    pixels: int
    hidden: int
    classes: int = CLASSES

    @classmethod
    def of(cls, lab: Lab, hidden: int = 0) -> Network:
        """Return the lab's network, or one with another number of hidden units."""
        return cls(lab.side**2, hidden or lab.hidden)

    @property
    def length(self) -> int:
        """Coordinates d of the model."""
        return self.hidden * (self.pixels + 1) + self.classes * (self.hidden + 1)

    @property
    def unit(self) -> NDArray[np.int64]:
        """The hidden unit of each coordinate, (d,), int64; ``hidden`` for the output biases, which have none."""
        h = self.hidden
        per_layer = (np.repeat(np.arange(h), self.pixels), np.arange(h), np.tile(np.arange(h), self.classes))
        return np.concatenate([*per_layer, np.full(self.classes, h)])

    def split(self, theta: Rows) -> tuple[Rows, Rows, Rows, Rows]:
        """Return W1 (hidden, pixels), b1 (hidden,), W2 (classes, hidden) and b2 (classes,) of a model (d,), as views."""
        at = np.cumsum([self.hidden * self.pixels, self.hidden, self.hidden * self.classes])
        w1, b1, w2, b2 = np.split(theta, at)
        return w1.reshape(self.hidden, self.pixels), b1, w2.reshape(self.classes, self.hidden), b2

    def origin(self, rng: np.random.Generator) -> Rows:
        """Return a random model (d,), float32, with the spread of torch's initialisation."""
        spread = np.full(self.length, self.hidden**-0.5)
        spread[: self.hidden * (self.pixels + 1)] = self.pixels**-0.5
        return np.asarray(rng.uniform(-1, 1, self.length) * spread, np.float32)

    def updates(self, theta: Rows, x: Rows, y: NDArray[np.int64], lr: float = LR) -> Rows:
        """Return the updates (n, d), float32, of one step of n devices from ``theta`` (d,).

        Args:
            theta: the model that all start from.
            x: images of each device, (n, batch, pixels), float32.
            y: their labels, (n, batch), int64.
            lr: step size.
        """
        w1, b1, w2, b2 = self.split(theta)
        n, batch = y.shape
        z = x @ w1.T + b1
        a = np.maximum(z, 0)
        q = a @ w2.T + b2
        q = np.exp(q - q.max(2, keepdims=True))
        q /= q.sum(2, keepdims=True)
        q[np.arange(n)[:, None], np.arange(batch)[None], y] -= 1
        q /= batch
        g = (q @ w2) * (z > 0)
        parts = (g.transpose(0, 2, 1) @ x, g.sum(1), q.transpose(0, 2, 1) @ a, q.sum(1))
        step = np.concatenate([part.reshape(n, -1) for part in parts], axis=1)
        step *= np.float32(-lr)
        # Devices send the difference of two float32 models, so an update carries the rounding of the sum.
        step += theta
        step -= theta
        return step
