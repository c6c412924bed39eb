"""Private coordinates of simulated devices: each has its own values, as `edge_client.models.private_values` stores on a real one.

A network's vector (d + p,) has its private coordinates anywhere. Strategies, masks and models have the other d, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.simulation.trainers.blocks import Rows
from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True)
class PrivateStart:
    """The private coordinates of a network, and the values that every device begins with.

    Attributes:
        places: ascending, shape (p,), int64; whole tensors of the network.
        values: shape (p,), float32.
    """

    places: NDArray[np.int64]
    values: Float32Vector

    def federated(self, length: int) -> NDArray[np.int64]:
        """Return the other coordinates of a vector of ``length``, ascending, shape (d,)."""
        return np.setdiff1d(np.arange(length), self.places)


@dataclass(frozen=True, slots=True)
class PrivateRows(Rows):
    """Updates (c, d) of the federated coordinates, and the private values (c, p) that were trained beside them."""

    private: Tensor


class PrivateParts:
    """The private values of all devices.

    Args:
        start: the values that they begin with.
        length: coordinates d + p of the network.
        devices: number of devices.
        device: torch's device that computes.
    """

    def __init__(self, start: PrivateStart, length: int, devices: int, device: torch.device) -> None:
        self._length = length
        self._private = torch.from_numpy(start.places).to(device)
        self._federated = torch.from_numpy(start.federated(length)).to(device)
        self._values = torch.from_numpy(start.values.astype(np.float32)).to(device).repeat(devices, 1)

    def of(self, places: NDArray[np.int64]) -> Tensor:
        """Return the values of some devices by their places (c,): a copy, shape (c, p)."""
        return self._values[torch.from_numpy(places).to(self._values.device)]

    def keep(self, places: NDArray[np.int64], trained: Tensor) -> None:
        """Store the trained values (c, p) of the devices at ``places`` (c,)."""
        self._values[torch.from_numpy(places).to(self._values.device)] = trained

    def joined(self, models: Tensor, private: Tensor) -> Tensor:
        """Return whole models (c, d + p) of federated ones (c, d) and private values (c, p)."""
        whole = models.new_empty(len(models), self._length)
        whole[:, self._federated] = models
        whole[:, self._private] = private
        return whole

    def cut(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Return the federated coordinates (c, d) and the private ones (c, p) of whole vectors (c, d + p)."""
        return whole[:, self._federated], whole[:, self._private]
