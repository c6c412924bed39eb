"""The backend in torch, for a GPU. Tests run it on the CPU.

As in numpy's backend, products of column chunks are computed in float32 and summed in float64. TF32, with 10 bits of mantissa, is
off meanwhile, whatever another part of the process allows. On CUDA a chunk is read into pinned memory and copied on a stream of
its own while the one before is multiplied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.rows import Updates, check_pair, check_rows, chunk_width, column_chunks
from shoal.errors import ConfigError

if TYPE_CHECKING:
    import torch

_INSTALL_HINT: Final = "install the aggregator extra: pip install 'shoal[aggregator]', or set device to cpu"


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products and convolutions of float32 in float32 inside the block: no TF32, no bfloat16; then restore what was."""
    import torch
    from torch.backends import cudnn

    # The older of torch's two ways to say so: torch.compile reads it, and fails where both were used.
    allowed, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)
        cudnn.allow_tf32 = convolutions


class TorchBackend:
    """Sums in torch. Products equal numpy's to 1e-6 of the vectors' lengths; means are numpy's.

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

    def gram(self, updates: Updates, *, precise: bool = False) -> NDArray[np.float64]:
        """Return all dot products of ``updates``, shape (n, d), float32, as (n, n), float64, symmetric; see `Backend.gram`."""
        count, _ = check_rows(updates, least=2)
        total = self._zeros(count, count)
        with full_precision():
            for (chunk,) in self._loaded(updates):
                piece = chunk.double() if precise else chunk
                total += piece @ piece.T
        # A GPU's product may round differently on the two sides of the diagonal.
        return self._fetch((total + total.T) / 2)

    def products(self, updates: Updates, others: Updates) -> NDArray[np.float64]:
        """Return dot products of ``updates`` (n, d) and ``others`` (k, d), both float32, as (n, k), float64."""
        total = self._zeros(*check_pair(updates, others))
        with full_precision():
            for piece, other in self._loaded(updates, others):
                total += piece @ other.T
        return self._fetch(total)

    def city_block(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sums of absolute differences of all pairs of ``rows`` (n, m), float64, as (n, n), float64."""
        there = self._torch.tensor(rows, device=self._device)
        return self._fetch(self._torch.cdist(there, there, 1.0))

    def weighted_mean(self, updates: Updates, weights: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the mean of ``updates`` (n, d), float32, under ``weights`` (n,), float64, as (d,), float32."""
        return weighted_mean(updates, weights)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return self._torch.zeros(shape, dtype=self._torch.float64, device=self._device)

    def _loaded(self, *sets: Updates) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the same columns of each of ``sets``, on the device; on the CPU they are valid until the next ones."""
        torch, on_gpu = self._torch, self._device.type == "cuda"
        width = chunk_width(max(map(len, sets)), len(sets[0][0]))
        readers = [
            column_chunks(
                rows,
                width=width,
                buffers=[torch.empty(len(rows), width, pin_memory=on_gpu).numpy() for _ in range(1 + on_gpu)],
            )
            for rows in sets
        ]
        if not on_gpu:
            yield from (tuple(map(torch.from_numpy, chunks)) for chunks in zip(*readers, strict=True))
            return
        copies, products = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        used: deque[Any] = deque()
        for chunks in zip(*readers, strict=True):
            with torch.cuda.stream(copies):
                pieces = tuple(torch.from_numpy(chunk).to(self._device, non_blocking=True) for chunk in chunks)
            products.wait_stream(copies)
            yield pieces
            # The buffer that is filled next was copied for the product before this one.
            used.append((products.record_event(), pieces))
            if len(used) > 1:
                used.popleft()[0].synchronize()

    def _fetch(self, tensor: torch.Tensor) -> NDArray[np.float64]:
        values: NDArray[np.float64] = tensor.cpu().numpy()
        return values
