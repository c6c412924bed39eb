"""Own training code of a device: the class that an operator writes, and gives to `shoal-edge run --trainer PACKAGE:CLASS`.

The code runs in a process of its own beside the device, which has the samples and the model and none of the device's keys
(`edge_client.learning.trainer`). It may use any library. A model is one float32 vector, as long as the layout's parameters
together; its private parameters, which come last, are this device's own and are never sent.

Rules
- The same arguments give the same result: a device that was killed trains its round again. Whatever a round leaves for the
  next one belongs into private parameters, such as running means. Draw from the seed alone.
- An exception, an exit or a model that is not finite costs this round. The process then begins afresh.

Example: mean regression, whose model is the one number that it answers.

    class Mean(Trainer):
        name, version = "mean", "1"

        def layout(self):
            return {"mean": ()}

        def train(self, theta, x, y, recipe, seed):
            losses = self.losses(theta, x, y)
            theta += recipe.lr * (y.mean() - theta)
            return float(losses.mean()), 1

        def losses(self, theta, x, y):
            return (theta - y) ** 2

        def predict(self, theta, x):
            return np.broadcast_to(theta, len(x))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.protocol.recipe import LocalTraining

__all__ = ["LocalTraining", "Trainer"]

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Trainer:
    """Base of own training code; a device makes one object of it for each process, without arguments.

    Attributes:
        name, version: as the owner's tasks name them; another version is another training code.
    """

    name: str = ""
    version: str = ""

    def layout(self) -> Mapping[str, tuple[int, ...]]:
        """Return name and shape of each parameter in the order of the vector, the private ones last; () is a scalar."""
        raise NotImplementedError

    def train(
        self, theta: NDArray[np.float32], x: NDArray[Any], y: NDArray[Any], recipe: LocalTraining, seed: int
    ) -> tuple[float, int]:
        """Train ``theta`` (d,) in place on all samples; return the mean training loss and the number of steps.

        Args:
            theta: the model, float32.
            x: samples, shape (n, *input shape), in the task's dtype.
            y: labels, shape (n, *label shape).
            recipe: what the owner asks for; ``lr`` is that of this round. FedProx and Ditto set ``prox_mu``, the weight of the
                pull towards the model at the start, mu/2 |w - w_0|^2.
            seed: 32 bits for the order of samples and all that is drawn; the same if the round is trained again.
        """
        raise NotImplementedError

    def losses(self, theta: NDArray[np.float32], x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
        """Return the loss of each sample, shape (n,). The model is scored as for an answer: nothing is learned."""
        raise NotImplementedError

    def predict(self, theta: NDArray[np.float32], x: NDArray[Any]) -> NDArray[Any]:
        """Return the answers: (n, classes) scores for classification, (n, *label shape) numbers for regression."""
        raise NotImplementedError

    def correct(self, theta: NDArray[np.float32], x: NDArray[Any], y: NDArray[Any]) -> int:
        """Return how many labels are answered right; by default those with the largest score, and 0 for numbers."""
        if y.dtype.kind == "f":
            return 0
        return int((np.asarray(self.predict(theta, x)).argmax(-1) == y).sum())

    def split(self, theta: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Return the parameters in ``theta`` by name, as views: what is written to them is written to ``theta``."""
        found, at = {}, 0
        for name, shape in self.layout().items():
            size = math.prod(shape)
            found[name] = theta[at : at + size].reshape(shape)
            at += size
        return found
