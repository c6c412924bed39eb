"""The division of work among ranks; `tests/integration/test_torchrun.py` has several processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aggregator.numerics.backend import NumpyBackend
from shoal.errors import ConfigError, IntegrityError
from shoal.simulation.engine import ranks
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.ranks import ALONE, ByCoordinates, Ranks, as_one, current_ranks, torchrun_ranks
from shoal.simulation.engine.simulate import simulate
from tests.helpers.simulations import FULL, NETWORK, population

pytestmark = pytest.mark.torch


class Scripted(Ranks):
    """Ranks of which the others' tensors are known; a test needs no other process."""

    def __init__(self, rank, others):
        super().__init__(rank, len(others) + 1, rank)
        self.others, self.sent = others, []

    def _gathered(self, own):
        self.sent.append(own.clone())
        found = [torch.as_tensor(other) for other in self.others]
        found.insert(self.rank, own)
        return found


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[], [5], [20] * 10, [1, 9, 4, 4, 30, 2, 2, 17, 8, 5]])
def test_every_device_belongs_to_one_rank(world, sizes):
    sizes = np.array(sizes, np.int64)
    parts = Ranks(0, world).parts(sizes)
    assert len(parts) == world
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(sizes)))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_equal_devices_are_divided_alike():
    """Equal devices are divided into neighbours and others by their samples."""
    assert [part.tolist() for part in Ranks(0, 3).parts(np.full(7, 4))] == [[0, 1], [2, 3], [4, 5, 6]]
    sizes = np.array([30, 10, 20, 20])
    parts = Ranks(1, 2).parts(sizes)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]
    many = np.random.default_rng(0).integers(1, 500, 200)
    loads = [many[part].sum() for part in Ranks(0, 4).parts(many)]
    assert max(loads) / min(loads) < 1.02


def test_rows_come_back_in_order_of_devices():
    """Rank 1 has one device more than rank 0, whose rows are padded."""
    parts = [np.array([1, 4]), np.array([0, 2, 3])]
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    scripted = Scripted(0, [rows[parts[1]]])
    np.testing.assert_array_equal(scripted.rows(rows[parts[0]], parts), rows)
    assert scripted.sent[0].shape == (3, 2)
    none = Scripted(0, [np.empty((0, 2), np.float32)])
    assert none.rows(rows[:0], [np.arange(0), np.arange(0)]).shape == (0, 2)


def test_sums_are_float64_in_ranks_order(monkeypatch):
    """In pieces, so that little is in memory at a time. In float32 the ones would be lost."""
    monkeypatch.setattr(ranks, "CHUNK", 100)
    scripted = Scripted(1, [np.ones(6), np.full(6, -1e9)])
    found = scripted.sum(torch.full((2, 3), 1e9))
    assert (found.dtype, found.shape) == (torch.float64, (2, 3))
    assert (found == 1.0).all()
    monkeypatch.setattr(ranks, "CHUNK", 2)
    alone = Ranks().sum(torch.arange(5.0))
    assert alone.tolist() == [0, 1, 2, 3, 4]


def test_ranks_compare_digests():
    same = Scripted(0, [])
    same.world, same.others = 2, [np.zeros(32, np.uint8)]
    with pytest.raises(IntegrityError, match="rank 1 and rank 0 differ in round 4") as caught:
        same.agree("round 4", b"models")
    assert "same version, libraries, options and data" in caught.value.hint
    same.others = [same.sent[0]]
    same.agree("round 4", b"mod", b"els")
    Ranks().agree("round 4", b"models")


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    assert (Ranks(1, 2, 1).device("cpu"), Ranks().device("cuda")) == ("cpu", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Ranks(3, 4, 1).device("cuda") == "cuda:1"
    with pytest.raises(ConfigError, match="rank 2 has no GPU of its own: this machine has 2"):
        Ranks(2, 4, 2).device("cuda")


def test_dot_products_are_sums_over_ranks():
    """Dot products are sums of those of the ranks coordinates."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, ranks.LEAST_COLUMNS + 1)).astype(np.float32)
    plain, half = NumpyBackend(), len(rows[0]) // 2
    first = Scripted(0, [plain.gram(rows[:, half:]).ravel()])
    np.testing.assert_allclose(ByCoordinates(plain, first).gram(rows), plain.gram(rows), rtol=1e-6, atol=1e-3)
    second = Scripted(1, [plain.products(rows[:, :half], rows[:2, :half]).ravel()])
    found = ByCoordinates(plain, second).products(list(rows), list(rows[:2]))
    np.testing.assert_allclose(found, plain.products(rows, rows[:2]), rtol=1e-6, atol=1e-3)


def test_short_vectors_are_not_divided():
    """Short vectors and other sums are not divided."""
    rows = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    plain, scripted = NumpyBackend(), Scripted(0, [np.zeros(1)])
    divided = ByCoordinates(plain, scripted)
    np.testing.assert_array_equal(divided.gram(rows), plain.gram(rows))
    np.testing.assert_array_equal(divided.products(rows, rows[:1]), plain.products(rows, rows[:1]))
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(divided.weighted_mean(rows, weights), plain.weighted_mean(rows, weights))
    np.testing.assert_array_equal(divided.city_block(rows.astype(float)), plain.city_block(rows.astype(float)))
    assert (divided.name, scripted.sent) == ("numpy", [])


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with torchrun_ranks() as found:
        assert found is ALONE is current_ranks()


def test_single_process_within_ranks(monkeypatch):
    """A block of a single process within ranks."""
    two = Ranks(0, 2)
    token = ranks._RANKS.set(two)
    try:
        with as_one():
            assert current_ranks() is ALONE
        assert current_ranks() is two
    finally:
        ranks._RANKS.reset(token)


def test_rounded_updates_need_single_process():
    token = ranks._RANKS.set(Ranks(0, 2))
    try:
        with pytest.raises(ConfigError, match="several ranks share no private values, no residuals"):
            simulate("fedavg", {}, population(), NETWORK, sim_options(rounds=1, local=FULL, precision_up="int8"))
    finally:
        ranks._RANKS.reset(token)
