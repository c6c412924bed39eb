"""Threads of matrix products."""

from contextlib import suppress

import pytest
import torch
from threadpoolctl import threadpool_info

from shoal.simulation.engine.threads import limited_threads

pytestmark = pytest.mark.torch


def blas_threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_threads_are_set_until_the_end():
    """Also if it ends with an error."""
    before = torch.get_num_threads(), blas_threads()
    with limited_threads(before[0] + 1):
        assert torch.get_num_threads() == before[0] + 1
        with limited_threads(1):
            assert (torch.get_num_threads(), blas_threads()) == (1, {1})
        assert torch.get_num_threads() == before[0] + 1
    assert (torch.get_num_threads(), blas_threads()) == before
    with suppress(RuntimeError), limited_threads(before[0] + 1):
        raise RuntimeError
    assert (torch.get_num_threads(), blas_threads()) == before
