"""Helpers of the functions on small matrices: a check of square matrices, and imports of scipy and scikit-learn on demand."""

from __future__ import annotations

import importlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ConfigError, IntegrityError

SYMMETRY_TOLERANCE: Final = 1e-9
"""Largest difference of two mirrored entries, relative to the larger of 1 and the largest entry."""


def check_square(matrix: NDArray[np.float64], what: str, *, least: int) -> NDArray[np.float64]:
    """Return ``matrix``, shape (n, n), as float64, if it is symmetric and finite and n is at least ``least``.

    Raises:
        NumericsError: it is not; the message starts with the matrix's name, ``what``.
    """
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise NumericsError(f"{what} has shape {values.shape}, not (n, n)")
    if len(values) < least:
        raise NumericsError(f"{what} covers {len(values)} updates, but at least {least} are needed")
    if not np.isfinite(values).all():
        raise NumericsError(f"{what} holds NaN or infinities")
    if np.abs(values - values.T).max() > SYMMETRY_TOLERANCE * max(1.0, float(np.abs(values).max())):
        raise NumericsError(f"{what} is not symmetric")
    return values


def scipy_module(name: str) -> Any:
    """Return the module ``name`` of scipy.

    Raises:
        ConfigError: scipy is not installed.
    """
    return _optional(name, "scipy")


def sklearn_module(name: str) -> Any:
    """Return the module ``name`` of scikit-learn.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    return _optional(name, "scikit-learn")


def _optional(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{package} is not installed", hint="install the aggregator extra: pip install 'shoal[aggregator]'"
        ) from None


class NumericsError(IntegrityError, ValueError):
    """An array has a wrong shape or dtype, or holds NaN or infinities."""
