"""The backend in torch, for a GPU. Tests run it on the CPU.

Products are computed in float64. A float32 product could run in TF32, with 10 bits of mantissa, if another part of the
process allows that; and most of the time is the transfer of the rows to the device, not their product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.rows import Updates, check_pair, check_rows, chunk_pairs, column_chunks
from shoal.errors import ConfigError

if TYPE_CHECKING:
    import torch

_INSTALL_HINT: Final = "install the aggregator extra: pip install 'shoal[aggregator]', or set device to cpu"


class TorchBackend:
    """Sums in torch. Products equal numpy's to 1e-6 of the vectors' lengths; means are numpy's.

    City-block distances are float32 sums with a relative error of 1e-6, no more than that of cosines of float32 updates.

    Args:
        device: a torch device, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: torch is not installed.
    """

    def __init__(self, device: str) -> None:
        try:
            import torch
        except ImportError:
            raise ConfigError("torch is not installed", hint=_INSTALL_HINT) from None
        self._torch = torch
        self._device = torch.device(device)

    @property
    def name(self) -> str:
        """``torch:<device>``."""
        return f"torch:{self._device}"

    def gram(self, updates: Updates) -> NDArray[np.float64]:
        """Return all dot products of ``updates``, shape (n, d), float32, as shape (n, n), float64, symmetric."""
        count, _ = check_rows(updates, least=2)
        total = self._zeros(count, count)
        for chunk in column_chunks(updates, copy=True):
            piece = self._load(chunk)
            total += piece @ piece.T
        # A GPU's product may round differently on the two sides of the diagonal.
        return self._fetch((total + total.T) / 2)

    def products(self, updates: Updates, others: Updates) -> NDArray[np.float64]:
        """Return dot products of ``updates`` (n, d) and ``others`` (k, d), both float32, as (n, k), float64."""
        total = self._zeros(*check_pair(updates, others))
        for chunk, other in chunk_pairs(updates, others, copy=True):
            total += self._load(chunk) @ self._load(other).T
        return self._fetch(total)

    def city_block(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sums of absolute differences of all pairs of ``rows`` (n, m), float64, as (n, n), float64."""
        count = len(rows)
        pairs = self._torch.nn.functional.pdist(self._torch.from_numpy(rows.astype(np.float32)).to(self._device), 1.0)
        total = np.zeros((count, count))
        total[np.triu_indices(count, 1)] = pairs.cpu().numpy()
        total += total.T
        return total

    def weighted_mean(self, updates: Updates, weights: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the mean of ``updates`` (n, d), float32, under ``weights`` (n,), float64, as (d,), float32."""
        return weighted_mean(updates, weights)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return self._torch.zeros(shape, dtype=self._torch.float64, device=self._device)

    def _load(self, chunk: NDArray[np.float32]) -> torch.Tensor:
        return self._torch.from_numpy(chunk).to(self._device).double()

    def _fetch(self, tensor: torch.Tensor) -> NDArray[np.float64]:
        values: NDArray[np.float64] = tensor.cpu().numpy()
        return values
