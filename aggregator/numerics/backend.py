"""Backends for large products and sums: numpy by default, torch on a GPU if one is present and the work is large enough.

Means have the same bits on every backend; products agree to 1e-6 of the vectors' lengths. Example: ``select("auto",
work_flops=gram_flops(n, d))`` returns the numpy backend without importing torch unless the work is worth a GPU.

`gram` and `cosine_matrix` make dot products and cosines between updates (cfl Eq. 13), in one pass over the coordinates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.checks import NumericsError, scipy_module
from aggregator.numerics.parted import PartedVector, VectorSpace, is_parted
from aggregator.numerics.rows import Updates, bad_rows, check_pair, check_rows, chunk_pairs, column_chunks
from shoal.errors import ConfigError

CUDA_PAYS_FLOPS: Final = 1e12
"""Least work (``gram_flops``) for which ``auto`` tries a GPU: 5 to 10 s on one core, while loading torch takes 2 to 3 s and
200 MB."""


class Backend(Protocol):
    """Sums over all coordinates, as the algorithms need them."""

    @property
    def name(self) -> str:
        """``numpy`` or ``torch:<device>``."""

    def gram(self, updates: Updates, *, precise: bool = False) -> NDArray[np.float64]:
        """Return all dot products.

        Args:
            updates: shape (n, d), float32, n at least 2.
            precise: form the products in float64, not only their sums.

        Returns:
            shape (n, n), float64, exactly symmetric; contains NaN or infinities if ``updates`` does.
        """

    def products(self, updates: Updates, others: Updates) -> NDArray[np.float64]:
        """Return the dot products of every update with every vector of ``others``.

        Args:
            updates: shape (n, d), float32, n at least 1.
            others: shape (k, d), float32, k at least 1; an array or rows, as ``updates``.

        Returns:
            shape (n, k), float64.
        """

    def city_block(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of absolute differences of every pair of rows.

        Args:
            rows: shape (n, m), float64, n at least 1.

        Returns:
            shape (n, n), float64, exactly symmetric, zeros on the diagonal.

        Raises:
            ConfigError: scipy is needed and not installed.
        """

    def weighted_mean(self, updates: Updates, weights: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the weighted mean; arguments as in ``averaging.weighted_mean``.

        Returns:
            shape (d,), float32: the same bits on every backend.
        """


def gram_flops(count: int, length: int) -> float:
    """Return the floating point operations of a Gram matrix of shape (count, count) over ``length`` coordinates."""
    return 2.0 * count * count * length


class NumpyBackend:
    """Products of float32 column chunks by BLAS, summed in float64; numpy computes ``A @ A.T`` with half the work (syrk)."""

    name = "numpy"

    def gram(self, updates: Updates, *, precise: bool = False) -> NDArray[np.float64]:
        """Return all dot products of ``updates``, shape (n, d), float32, as (n, n), float64, symmetric; see `Backend.gram`."""
        count, _ = check_rows(updates, least=2)
        total = np.zeros((count, count))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for chunk in column_chunks(updates):
                piece = chunk.astype(np.float64) if precise else chunk
                total += piece @ piece.T
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


SAFE_SQUARED_NORM: Final = (1e-24, 1e30)
"""Range of squared norms within which a row's squares neither vanish nor overflow in float32; other rows are scaled first."""


def space_of(updates: Updates, backend: Backend | None = None) -> Backend | VectorSpace:
    """Return what forms products of ``updates``: the workers that hold their parts, else ``backend``, numpy if None."""
    return updates[0].space if is_parted(updates) else backend or NumpyBackend()


def gram(updates: Updates, *, backend: Backend | None = None, precise: bool = False) -> NDArray[np.float64]:
    """Return all dot products between ``updates``.

    Precise products take twice the time and have errors of 1e-15 instead of 1e-7: a singular value is the root of an eigenvalue,
    so an error of 1e-7 in the products becomes up to 3e-4 of the largest singular value.

    Args:
        updates: shape (n, d), float32, finite, n at least 2.
        backend: numpy by default.
        precise: form the products in float64.

    Returns:
        shape (n, n), float64, exactly symmetric.

    Raises:
        NumericsError: wrong shape or dtype, NaN or infinities, or products beyond float32's range.
    """
    found = space_of(updates, backend).gram(updates, precise=precise)
    if not np.isfinite(found).all():
        raise NumericsError(f"dot products are not finite; rows with NaN or infinities: {bad_rows(updates)}")
    return found


def products(
    updates: Updates, others: Sequence[NDArray[np.float32]], *, backend: Backend | None = None
) -> NDArray[np.float64]:
    """Return the dot products of ``updates`` (n, d) with the vectors ``others``, k of (d,), float32, as (n, k), float64."""
    return space_of(updates, backend).products(updates, others)


def cosine_from_gram(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosines of the vectors with the given dot products.

    Args:
        products: shape (n, n), float64, symmetric, finite.

    Returns:
        shape (n, n), float64, symmetric, in [-1, 1]; 1 on the diagonal, but a zero vector has cosine 0 with
        every vector and with itself.

    Raises:
        NumericsError: not square, not finite, or a negative diagonal.
    """
    if products.ndim != 2 or products.shape[0] != products.shape[1]:
        raise NumericsError(f"a Gram matrix has shape (n, n), not {products.shape}")
    if not np.isfinite(products).all():
        raise NumericsError("the Gram matrix holds NaN or infinities")
    squared = np.diagonal(products)
    if (squared < 0).any():
        raise NumericsError("a Gram matrix has no negative diagonal")
    zero = squared == 0
    norms = np.sqrt(np.where(zero, 1.0, squared))
    cosines = products / norms[:, None] / norms[None, :]
    # Two divisions round differently on the two sides of the diagonal.
    cosines = np.clip((cosines + cosines.T) / 2, -1.0, 1.0)
    cosines[zero, :] = 0.0
    cosines[:, zero] = 0.0
    np.fill_diagonal(cosines, np.where(zero, 0.0, 1.0))
    return cosines


def cosine_matrix(updates: Updates, *, backend: Backend | None = None) -> NDArray[np.float64]:
    """Return the cosine of every pair of ``updates`` (cfl Eq. 13).

    Args:
        updates: shape (n, d), float32, finite, n at least 2; read in column chunks, so a ``numpy.memmap`` or a list
            of rows is never held in memory at once.
        backend: numpy by default.

    Returns:
        shape (n, n), float64, exactly symmetric, in [-1, 1]; 1 on the diagonal, but a zero update has cosine 0 with
        every update and with itself.

    Raises:
        NumericsError: fewer than two rows, another dtype than float32, NaN or infinities.
    """
    products = space_of(updates, backend).gram(updates)
    squared = np.diagonal(products)
    low, high = SAFE_SQUARED_NORM
    unsafe = ~((squared > low) & (squared < high))
    if unsafe.any():
        products = space_of(updates, backend).gram(_rescale(updates, unsafe))
    return cosine_from_gram(products)


def _rescale(updates: Updates, unsafe: NDArray[np.bool_]) -> list[Any]:
    rows: list[Any] = []
    for position, row in enumerate(updates):
        if unsafe[position] and isinstance(row, PartedVector):
            rows.append(row.scaled_to_one())
        elif unsafe[position]:
            peak = np.abs(row).max()
            if not np.isfinite(peak):
                raise NumericsError(f"updates hold NaN or infinities in rows {bad_rows(updates)}")
            # float64: the reciprocal of a subnormal overflows float32.
            rows.append((row / np.float64(peak)).astype(np.float32) if peak > 0 else row)
        else:
            rows.append(row)
    return rows
