"""The error that all numeric functions raise for invalid input."""

from __future__ import annotations

from shoal.errors import IntegrityError


class NumericsError(IntegrityError, ValueError):
    """An array has a wrong shape or dtype, or holds NaN or infinities."""
