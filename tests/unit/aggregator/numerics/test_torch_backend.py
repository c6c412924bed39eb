"""Sums in torch on the CPU: the bits of means, the accuracy of products, and a machine without torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from aggregator.numerics.backend import NumpyBackend, gram
from aggregator.numerics.rows import CHUNK_COLUMNS, Updates, column_chunks
from aggregator.numerics.torch_backend import TorchBackend, full_precision
from shoal.errors import ConfigError

needs_torch = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
ROWS = np.random.default_rng(2).standard_normal((5, 1000), dtype=np.float32)


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch the error says what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"^torch is not installed$") as caught:
        TorchBackend("cpu")
    assert caught.value.hint == "install the aggregator extra: pip install 'shoal[aggregator]', or set device to cpu"


@pytest.fixture
def backend() -> TorchBackend:
    """Return the backend on the CPU."""
    return TorchBackend("cpu")


class TestWithTorch:
    """Tests that run torch."""

    pytestmark = needs_torch

    def test_the_name_has_the_device(self, backend: TorchBackend) -> None:
        assert backend.name == "torch:cpu"

    def test_chunks_are_summed_in_float64(self, backend: TorchBackend) -> None:
        """In float32 the ones of the second chunk would vanish beside 2^24, and the result be 0."""
        rows = np.zeros((2, 3 * CHUNK_COLUMNS), np.float32)
        rows[:, 0], rows[:, CHUNK_COLUMNS], rows[:, -1] = 2**12, 1.0, (2**12, -(2**12))
        expected = [[2.0**25 + 1, 1.0], [1.0, 2.0**25 + 1]]
        np.testing.assert_array_equal(backend.gram(rows), expected)
        np.testing.assert_array_equal(backend.products(rows, rows), expected)

    def test_a_precise_product_is_of_float64(self, backend: TorchBackend) -> None:
        """All in one chunk, which float32 would sum to 0."""
        long, short = np.float32(2**12), np.float32(1.0)
        rows = np.array([[long, short, long], [long, short, -long]], np.float32)
        expected = [[2.0**25 + 1, 1.0], [1.0, 2.0**25 + 1]]
        np.testing.assert_array_equal(backend.gram(rows, precise=True), expected)
        np.testing.assert_array_equal(gram(rows, backend=backend, precise=True), expected)

    @pytest.mark.parametrize("allowed", ["high", "highest"])
    def test_tf32_is_off_meanwhile(self, backend: TorchBackend, allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What another part of the process has allowed holds again afterwards, also after an error."""
        import torch

        during, loaded = [], backend._loaded

        def settings() -> tuple[str, bool, bool]:
            cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
            return torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cudnn.allow_tf32

        def watched(*sets: Updates) -> Iterator[tuple[torch.Tensor, ...]]:
            during.append(settings())
            return loaded(*sets)

        monkeypatch.setattr(backend, "_loaded", watched)
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision(allowed)
            was = settings()
            backend.gram(ROWS)
            backend.products(ROWS, ROWS)
            assert during == [("highest", False, False)] * 2
            with pytest.raises(RuntimeError), full_precision():
                raise RuntimeError
            assert settings() == was
            assert was == (allowed, allowed == "high", True)
        finally:
            torch.set_float32_matmul_precision(before)

    def test_buffers_take_turns(self) -> None:
        """While one piece is copied to a GPU, the next is read into the other buffer."""
        buffers = [np.empty((5, 300), np.float32) for _ in range(2)]
        pieces = list(column_chunks(ROWS, width=300, buffers=buffers))
        assert [np.may_share_memory(piece, buffers[n % 2]) for n, piece in enumerate(pieces)] == [True] * 4
        np.testing.assert_array_equal(pieces[2], ROWS[:, 600:900])

    def test_updates_and_centres_keep_sides(self, backend: TorchBackend) -> None:
        """Updates and centres keep their sides."""
        rows, others = np.array([[1, 0], [0, 1], [2, 2]], np.float32), np.array([[3, 5]], np.float32)
        np.testing.assert_array_equal(backend.products(rows, others), [[3], [5], [16]])

    def test_a_mean_has_numpys_bits(self, backend: TorchBackend) -> None:
        weights = np.array([1.0, 3.0, 0.1, 2.0**24 + 1, 0.0])
        assert backend.weighted_mean(ROWS, weights).tobytes() == NumpyBackend().weighted_mean(ROWS, weights).tobytes()

    def test_city_block_is_symmetric(self, backend: TorchBackend) -> None:
        """City block distances are symmetric and zero on the diagonal."""
        rows = np.array([[0.0, 0.0], [1.0, -2.0], [4.0, 0.5]])
        found = backend.city_block(rows)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, [[0, 3, 4.5], [3, 0, 5.5], [4.5, 5.5, 0]], rtol=1e-6)
        np.testing.assert_allclose(found, NumpyBackend().city_block(rows), rtol=1e-6)
