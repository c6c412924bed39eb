"""The threads of matrix products, in torch and in numpy's BLAS, and their precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

from aggregator.numerics.torch_backend import full_precision


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Give matrix products ``count`` threads and float32's full precision inside the block, and what they had before after it.

    A fixed number keeps results the same: sums that are cut differently round differently.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with full_precision(), threadpool_limits(limits=count, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
