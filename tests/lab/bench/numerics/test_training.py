"""The simulator's kernel as `shoal bench numerics` reports it: its arithmetic and its fields; no time is asserted."""

import pytest
import torch
from shoal_lab.bench.numerics import training as kernels

pytestmark = pytest.mark.torch


def test_operations_are_those_of_the_plain_form():
    """Ten steps of one device with one sample: two products with W1, three with W2, two operations a weight."""
    assert kernels.training_flops(1, 1) == 10 * (2 * 2 * 784 * 200 + 3 * 2 * 200 * 10)


def test_the_measurement_leaves_threads_as_they_were():
    before = torch.get_num_threads()
    seconds, ceiling, naive = kernels.measure_training(20, 4, 1)
    assert torch.get_num_threads() == before
    assert min(seconds, ceiling, naive) > 0
