"""Backends agree, and ``select`` loads torch only where it pays."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aggregator.numerics.backend import (
    CUDA_PAYS_FLOPS,
    Backend,
    NumpyBackend,
    cosine_matrix,
    driver_visible,
    gram_flops,
    select,
)
from aggregator.numerics.checks import NumericsError
from aggregator.numerics.rows import CHUNK_COLUMNS
from aggregator.numerics.torch_backend import TorchBackend
from shoal.errors import ConfigError

ROOT = Path(__file__).parents[4]
ROWS = np.random.default_rng(21).standard_normal((6, CHUNK_COLUMNS + 777), dtype=np.float32)
WEIGHTS = np.array([1.0, 5.0, 0.0, 60.0, 3.0, 2.0])

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
BACKENDS = ["numpy", pytest.param("torch", marks=[pytest.mark.torch, needs_torch])]


def make(name: str) -> Backend:
    return NumpyBackend() if name == "numpy" else TorchBackend("cpu")


@pytest.mark.parametrize("name", BACKENDS)
def test_products_equal_float64(name: str) -> None:
    """Relative to the vectors' lengths, within 1e-6."""
    backend = make(name)
    wide = ROWS.astype(np.float64)
    scale = float(np.linalg.norm(wide, axis=1).max() ** 2)
    products = backend.gram(ROWS)
    assert products.dtype == np.float64
    np.testing.assert_array_equal(products, products.T)
    np.testing.assert_allclose(products, wide @ wide.T, atol=1e-6 * scale)
    np.testing.assert_allclose(backend.products(ROWS, ROWS[:2]), wide @ wide[:2].T, atol=1e-6 * scale)
    mean = backend.weighted_mean(ROWS, WEIGHTS)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, np.average(wide, axis=0, weights=WEIGHTS), atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_memory_map_and_list_are_taken(name: str, tmp_path: Path) -> None:
    """A read only memory map and a list are taken."""
    path = tmp_path / "rows.f32"
    ROWS.tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="r", shape=ROWS.shape)
    expected = cosine_matrix(ROWS)
    for updates in (mapped, list(mapped)):
        np.testing.assert_allclose(cosine_matrix(updates, backend=make(name)), expected, atol=1e-6)
    mean = make(name).weighted_mean(mapped, WEIGHTS)
    np.testing.assert_allclose(mean, make("numpy").weighted_mean(ROWS, WEIGHTS), atol=1e-6)


BAD = ROWS.copy()
BAD[4, 5] = np.nan
REFUSED: dict[str, tuple[Callable[[Backend], object], str]] = {
    "a cosine of NaN": (lambda backend: cosine_matrix(BAD, backend=backend), r"\[4\]"),
    "a mean of NaN": (lambda backend: backend.weighted_mean(BAD, WEIGHTS), r"\[4\]"),
    "weights of 0": (lambda backend: backend.weighted_mean(ROWS, np.zeros(6)), "weights are 0"),
    "another length": (lambda backend: backend.products(ROWS, ROWS[:, :9]), "coordinates"),
    "one row": (lambda backend: backend.gram(ROWS[:1]), "at least 2"),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", REFUSED)
def test_backends_refuse_the_same_input(name: str, case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(NumericsError, match=message):
        call(make(name))


def test_small_work_stays_on_numpy() -> None:
    assert gram_flops(100, 1_000_000) < CUDA_PAYS_FLOPS < gram_flops(5_000, 1_000_000)
    assert select("auto", work_flops=gram_flops(100, 1_000_000)).name == "numpy"
    assert select("cpu", work_flops=1e18).name == "numpy"


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tpu'") as caught:
        select("tpu")
    assert "auto" in caught.value.hint


@pytest.mark.torch
@needs_torch
def test_missing_cuda_has_a_hint() -> None:
    """Cuda without cuda is refused with a hint."""
    import torch

    if torch.cuda.is_available():
        assert select("cuda").name == "torch:cuda"
        return
    with pytest.raises(ConfigError, match="no CUDA device") as caught:
        select("cuda")
    assert "cpu" in caught.value.hint


@pytest.mark.torch
@needs_torch
def test_cuda_agrees_with_numpy() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    backend = select("auto", work_flops=1e18)
    assert backend.name == "torch:cuda"
    np.testing.assert_allclose(cosine_matrix(ROWS, backend=backend), cosine_matrix(ROWS), atol=1e-6)
    square = cosine_matrix(ROWS)
    np.testing.assert_allclose(backend.city_block(square), NumpyBackend().city_block(square), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        backend.weighted_mean(ROWS, WEIGHTS), NumpyBackend().weighted_mean(ROWS, WEIGHTS), atol=1e-6
    )


def test_auto_needs_a_driver_for_torch() -> None:
    """A fresh interpreter, large work, no NVIDIA driver: numpy, and torch was never loaded."""
    if driver_visible():
        pytest.skip("an NVIDIA driver is visible on this machine")
    code = (
        "import sys; from aggregator.numerics.backend import select; from aggregator.numerics import gap;"
        "assert select('auto', work_flops=1e18).name == 'numpy'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_without_torch_cuda_is_refused() -> None:
    """An aggregator installed without torch says what to install."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from aggregator.numerics.backend import select\n"
        "from shoal.errors import ConfigError\n"
        "assert select('auto', work_flops=1e18).name == 'numpy'\n"
        "try:\n    select('cuda')\n"
        "except ConfigError as error:\n    assert 'shoal[aggregator]' in error.hint\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
