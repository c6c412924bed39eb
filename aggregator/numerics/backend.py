"""Backends for large products and sums: numpy by default, torch on a GPU if one is present and the work is large enough.

Means have the same bits on every backend; products agree to 1e-6 of the vectors' lengths. Example: ``select("auto",
work_flops=gram_flops(n, d))`` returns the numpy backend without importing torch unless the work is worth a GPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import RunningMean, StreamingMean, weighted_mean
from aggregator.numerics.checks import scipy_module
from aggregator.numerics.rows import Updates, check_pair, check_rows, chunk_pairs, column_chunks
from shoal.errors import ConfigError

CUDA_PAYS_FLOPS: Final = 1e12
"""Least work (``gram_flops``) for which ``auto`` tries a GPU: 5 to 10 s on one core, while loading torch takes 2 to 3 s and
200 MB."""


class Backend(Protocol):
    """Sums over all coordinates, as the algorithms need them."""

    @property
    def name(self) -> str:
        """``numpy`` or ``torch:<device>``."""
        ...

    def gram(self, updates: Updates) -> NDArray[np.float64]:
        """Return all dot products.

        Args:
            updates: shape (n, d), float32, n at least 2.

        Returns:
            shape (n, n), float64, exactly symmetric; contains NaN or infinities if ``updates`` does.
        """
        ...

    def products(self, updates: Updates, others: Updates) -> NDArray[np.float64]:
        """Return the dot products of every update with every vector of ``others``.

        Args:
            updates: shape (n, d), float32, n at least 1.
            others: shape (k, d), float32, k at least 1; an array or rows, as ``updates``.

        Returns:
            shape (n, k), float64.
        """
        ...

    def city_block(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of absolute differences of every pair of rows.

        Args:
            rows: shape (n, m), float64, n at least 1.

        Returns:
            shape (n, n), float64, exactly symmetric, zeros on the diagonal.

        Raises:
            ConfigError: scipy is needed and not installed.
        """
        ...

    def weighted_mean(self, updates: Updates, weights: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the weighted mean; arguments as in ``averaging.weighted_mean``.

        Returns:
            shape (d,), float32: the same bits on every backend.
        """
        ...

    def running_mean(self, length: int) -> RunningMean:
        """Return an empty mean of ``length`` coordinates that takes one update at a time."""
        ...


def gram_flops(count: int, length: int) -> float:
    """Return the floating point operations of a Gram matrix of shape (count, count) over ``length`` coordinates."""
    return 2.0 * count * count * length


class NumpyBackend:
    """Products of float32 column chunks by BLAS, summed in float64; numpy computes ``A @ A.T`` with half the work (syrk)."""

    name = "numpy"

    def gram(self, updates: Updates) -> NDArray[np.float64]:
        """Return all dot products of ``updates``, shape (n, d), float32, as shape (n, n), float64, symmetric."""
        count, _ = check_rows(updates, least=2)
        total = np.zeros((count, count))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for chunk in column_chunks(updates):
                total += chunk @ chunk.T
        return total

    def products(self, updates: Updates, others: Updates) -> NDArray[np.float64]:
        """Return dot products of ``updates`` (n, d) and ``others`` (k, d), both float32, as (n, k), float64."""
        total = np.zeros(check_pair(updates, others))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for chunk, other in chunk_pairs(updates, others):
                total += chunk @ other.T
        return total

    def city_block(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sums of absolute differences of all pairs of ``rows`` (n, m), float64, as (n, n), float64."""
        distance = scipy_module("scipy.spatial.distance")
        total: NDArray[np.float64] = distance.squareform(distance.pdist(rows, "cityblock"))
        return total

    def weighted_mean(self, updates: Updates, weights: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the mean of ``updates`` (n, d), float32, under ``weights`` (n,), float64, as (d,), float32."""
        return weighted_mean(updates, weights)

    def running_mean(self, length: int) -> RunningMean:
        """Return an empty mean of ``length`` coordinates."""
        return StreamingMean(length)


def select(device: str, *, work_flops: float = 0.0) -> Backend:
    """Return the backend for ``device``.

    Args:
        device: ``cpu``; ``cuda``, which fails without a GPU; or ``auto``, which uses a GPU if ``work_flops`` is large
            enough, an NVIDIA driver is visible and torch can use it, checked in this order.
        work_flops: the largest single computation expected, as ``gram_flops`` counts it.

    Raises:
        ConfigError: ``device`` is none of these, or is ``cuda`` and no CUDA device can be used.
    """
    if device == "cpu":
        return NumpyBackend()
    if device == "cuda":
        from aggregator.numerics.torch_backend import TorchBackend

        backend = TorchBackend("cuda")
        if not _cuda_available():
            raise ConfigError(
                "no CUDA device can be used", hint="check nvidia-smi and torch's CUDA build, or set device to cpu"
            )
        return backend
    if device != "auto":
        raise ConfigError(f"device {device!r} is not known", hint="use auto, cpu or cuda")
    if work_flops < CUDA_PAYS_FLOPS or not driver_visible() or not _cuda_available():
        return NumpyBackend()
    from aggregator.numerics.torch_backend import TorchBackend

    return TorchBackend("cuda")


def driver_visible() -> bool:
    """Return whether this machine has an NVIDIA driver, without importing torch."""
    if Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists():
        return True
    # WSL has the library without these files.
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _cuda_available() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
