"""The backends of the aggregator's numerics for tests; a test is skipped if its device is missing."""

from __future__ import annotations

import importlib.util

import pytest

from aggregator.numerics.backend import Backend, NumpyBackend
from aggregator.numerics.torch_backend import TorchBackend

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
BACKENDS = [
    "numpy",
    pytest.param("cpu", marks=[pytest.mark.torch, needs_torch]),
    pytest.param("cuda", marks=[pytest.mark.torch, needs_torch]),
]


def make(name: str) -> Backend:
    """Return the backend; skip the test if there is no such device."""
    if name == "numpy":
        return NumpyBackend()
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return TorchBackend(name)
