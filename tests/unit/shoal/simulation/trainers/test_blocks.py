"""Blocks of devices: padding, weights, order of batches, and the sums of updates."""

import dataclasses

import numpy as np
import pytest
import torch

from shoal.errors import DataError, TaskError
from shoal.simulation.data import Shard, shards_of
from shoal.simulation.trainers.blocks import (
    Limits,
    Rows,
    Shelf,
    check_losses,
    devices_within,
    schedule,
    step_size,
)
from tests.unit.shoal.simulation.trainers.trainers import INPUTS, PLAIN, orders

pytestmark = pytest.mark.torch


def shelf_of(*sizes):
    """Return a shelf whose device i has ``sizes[i]`` samples (100 i, 100 i + 1, ...), each labelled i."""
    return Shelf([Shard(np.arange(n, dtype=np.float32)[:, None] + 100 * i, np.full(n, i)) for i, n in enumerate(sizes)])


def test_equal_shards_are_not_copied():
    """A stack of consecutive views is the array itself, and so is a block of consecutive devices."""
    x, y = np.zeros((4, 3, INPUTS), np.float32), np.zeros((4, 3), np.int64)
    block = Shelf(shards_of(x, y)).block(np.array([1, 2]))
    x[1, 0, 0] = 7.0
    assert float(block.x[0, 0, 0]) == 7.0


@pytest.mark.parametrize(
    ("sizes", "x", "y", "weights"),
    [
        ((3, 1, 2), [[200, 201, 0], [0, 1, 2]], [[2, 2, 0], [0, 0, 0]], [[0.5, 0.5, 0], [1 / 3] * 3]),
        # Its mean would divide by zero.
        ((2, 1, 0), [[0, 0], [0, 1]], [[0, 0], [0, 0]], [[0, 0], [0.5, 0.5]]),
        ((2, 2, 2), [[200, 201], [0, 1]], [[2, 2], [0, 0]], [[0.5, 0.5], [0.5, 0.5]]),
    ],
    ids=["shorter", "empty", "equal"],
)
def test_padding_has_no_weight(sizes, x, y, weights):
    """Devices stand in the order that was asked for; shorter ones are padded with zeros of no weight."""
    block = shelf_of(*sizes).block(np.array([2, 0]))
    assert (block.x[..., 0].tolist(), block.y.tolist()) == (x, y)
    assert block.lengths.tolist() == [sizes[2], sizes[0]]
    assert block.padded == (sizes[2] != sizes[0])
    np.testing.assert_allclose(block.weights().numpy(), weights)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 1, 3)])
def test_joined_samples_have_no_padding(sizes):
    """Joined samples follow the order of the devices without padding."""
    x, y = shelf_of(*sizes).joined(np.array([2, 0]))
    assert x[:, 0].tolist() == [*(200 + i for i in range(sizes[2])), 0, 1]
    assert y.tolist() == [2] * sizes[2] + [0, 0]


def test_read_only_samples_are_copied():
    """Torch would warn of them, and write through."""
    x, y = np.zeros((2, 3, 1), np.float32), np.zeros((2, 3), np.int64)
    x.flags.writeable = y.flags.writeable = False
    block = Shelf(shards_of(x, y)).block(np.array([0, 1]))
    block.x[0, 0, 0] = 5
    assert x[0, 0, 0] == 0


def test_other_shapes_are_refused():
    """Equal sizes of other shapes are refused."""
    shards = [Shard(np.zeros((2, n), np.float32), np.zeros(2, np.int64)) for n in (3, 4)]
    with pytest.raises(DataError, match="devices' samples differ in shape or dtype"):
        Shelf(shards)


@pytest.mark.parametrize(
    ("sizes", "ids", "limits", "parts"),
    [
        ((3, 3, 3, 3, 3), [4, 0, 3], Limits(2, 100), [[4, 0], [3]]),
        ((3,), [], Limits(2, 100), []),
        ((30, 2, 2), [0, 1, 2], Limits(9, 10), [[0], [1, 2]]),
    ],
    ids=["equal devices in order", "none", "a large one alone"],
)
def test_parts_of_devices(sizes, ids, limits, parts):
    assert [p.tolist() for p in shelf_of(*sizes).parts(np.array(ids, np.int64), limits)] == parts


def test_most_steps_come_first():
    """Two epochs of batches of 2 on 1, 4 and 3 samples: 2, 4 and 4 steps."""
    local = dataclasses.replace(PLAIN, epochs=2, batch_size=2)
    made = schedule(np.array([1, 4, 3]), local, orders(3), torch.device("cpu"))
    assert made.by_steps.tolist() == [1, 2, 0]
    assert made.active.tolist() == [3, 3, 2, 2]
    assert made.visited.tolist() == [8, 6, 2]
    assert made.weights[1].tolist() == [[0.5, 0.5], [1, 0], [1, 0]]
    assert sorted(made.rows[:2, 0].flatten().tolist()) == [0, 1, 2, 3]


def test_sums_leave_others_out():
    """Sums of updates leave out the other devices."""
    rows = Rows(torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]), np.zeros(3))
    assert rows.norms().tolist() == [5, 1, 2]
    total = torch.tensor([10.0, 10.0])
    rows.add_to(total, np.array([0, 2]), None)
    assert total.tolist() == [13, 16]
    rows.add_to(total, np.array([1, 2]), np.array([2, 0.5], np.float32))
    assert total.tolist() == [15, 17]


def test_step_size_decays_from_round_2():
    """A step size decays from the second round on."""
    local = dataclasses.replace(PLAIN, lr=0.1, lr_decay=0.5)
    assert step_size(local, 1) == float(np.float32(0.1))
    assert step_size(local, 3) == float(np.float32(0.025))


def test_a_block_holds_at_least_one_device():
    assert [devices_within(100, length, 8) for length in (1000, 25, 1)] == [1, 4, 8]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_infinite_losses_are_refused(bad):
    """Losses that are not finite are refused."""
    assert check_losses(np.array([1.0, 2.0])).tolist() == [1, 2]
    with pytest.raises(TaskError, match="a simulated device's training diverged") as caught:
        check_losses(np.array([1.0, bad]))
    assert caught.value.hint == "lower the learning rate, or set clip"
