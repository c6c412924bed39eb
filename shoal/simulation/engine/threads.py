"""The number of threads of matrix products, in torch and in numpy's BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Give matrix products ``count`` threads inside the block, and as many as before after it.

    A fixed number keeps results the same: sums that are cut differently round differently.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(limits=count, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
