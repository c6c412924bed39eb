"""Mixtures of linear models, and the batched starts against the strategy that the daemon runs."""

import numpy as np
import pytest
import torch
from shoal_lab.experiments.common.experiment import Options
from shoal_lab.experiments.common.paper import paper_options
from shoal_lab.experiments.ifca import synthetic
from shoal_lab.experiments.ifca.synthetic import (
    Batch,
    Point,
    make_mixture,
    matched_distance,
    one_at_a_time,
    permutation_of,
    random_starts,
    run_starts,
)

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.simulate import simulate
from shoal.simulation.trainers.networks import Linear

SMALL = Point(k=2, m=8, n=12, scale=0.5, sigma=0.1, d=20)


def starts_of(point, count, rates):
    starts = random_starts(count, point.k, point.d, (1,))
    return starts.repeat_interleave(len(rates), 0), torch.tensor(rates).repeat(count)


def masks(d, mask="permutation", seed=0):
    return synthetic.round_masks(d, Options(seed=seed, mask=mask), b"run")


def test_a_batch_equals_one_start_at_a_time():
    mixture = make_mixture(SMALL, (0, 1))
    starts, rates = starts_of(SMALL, 3, [0.5, 0.05])
    batch = Batch(mixture, starts, rates)
    for _ in range(40):
        batch.step()
    for r in range(len(starts)):
        thetas, choices = one_at_a_time(mixture, starts[r], float(rates[r]), 40)
        np.testing.assert_array_equal(batch.choices[r].numpy(), choices)
        np.testing.assert_allclose(batch.models[r].numpy(), thetas, atol=1e-5)


def test_blocks_give_the_same_sums(monkeypatch):
    mixture = make_mixture(SMALL, (0, 2))
    starts, rates = starts_of(SMALL, 2, [0.5])
    whole = Batch(mixture, starts, rates)
    whole.step()
    pieces = Batch(mixture, starts, rates)
    pieces.block = 3
    pieces.step()
    assert torch.equal(whole.choices, pieces.choices)
    torch.testing.assert_close(whole.models, pieces.models, rtol=1e-5, atol=1e-6)


def test_a_rounds_mask_hides_its_moves_alone():
    mixture = make_mixture(SMALL, (0, 3))
    starts, rates = starts_of(SMALL, 2, [0.5])
    clear, masked = Batch(mixture, starts, rates), Batch(mixture, starts, rates, masks(SMALL.d, seed=9))
    again, orders = masks(SMALL.d, seed=9), []
    for round_ in range(1, 31):
        clear.step()
        masked.step()
        key, by_key = again.take(round_), np.empty(SMALL.d, np.float32)
        key.apply(clear.moves[0, 1].numpy(), by_key)
        assert np.array_equal(masked.moves[0, 1].numpy(), by_key)
        orders.append(tuple(permutation_of(key, SMALL.d)[0]))
    assert torch.equal(masked.models, clear.models)
    assert len(set(orders)) == 30


def test_the_distance_is_the_best_matchings():
    truth = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    swapped = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    assert float(matched_distance(swapped, truth)) == 0
    both = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
    assert float(matched_distance(both, truth)) == pytest.approx(2.5)


def test_points_of_one_size_share_draws():
    low, high = make_mixture(SMALL, (0, 0)), make_mixture(Point(k=2, m=8, n=12, scale=1.0, sigma=0.1, d=20), (0, 0))
    assert torch.equal(low.x, high.x)
    torch.testing.assert_close(low.truth * 2, high.truth)
    assert not torch.equal(low.x, make_mixture(SMALL, (0, 1)).x)


def test_the_noise_and_the_norm_are_as_asked():
    point = Point(k=2, m=40, n=100, scale=3.0, sigma=0.5, d=30, norm=True)
    mixture = make_mixture(point, (0, 0))
    torch.testing.assert_close(torch.linalg.vector_norm(mixture.truth, dim=1), torch.tensor([3.0, 3.0]))
    noise = mixture.y - torch.einsum("mnd,md->mn", mixture.x, mixture.truth[mixture.groups])
    assert float(noise.std()) == pytest.approx(0.5, rel=0.05)
    assert mixture.groups.bincount().tolist() == [20, 20]


@pytest.mark.parametrize("number", range(4))
def test_settling_early_changes_no_verdict(number):
    """Every start that is stopped early is on the side of the threshold on which it would have ended."""
    point = Point(k=2, m=20, n=40, scale=0.3, sigma=0.1, d=60)
    mixture = make_mixture(point, (5, number))
    starts, rates = starts_of(point, 6, [1.0, 0.1, 0.01])
    common = {"iterations": 200, "threshold": 0.06}
    full = run_starts(mixture, starts, rates, **common)
    early = run_starts(mixture, starts, rates, **common, settle=True)
    assert torch.equal(full.distances <= 0.06, early.distances <= 0.06)
    assert int(early.iterations.sum()) < int(full.iterations.sum())


@pytest.mark.parametrize("mask", ["none", "permutation"])
@pytest.mark.parametrize("point", [SMALL, Point(k=4, m=12, n=6, scale=0.5, sigma=0.1, d=20)])
def test_the_batch_ends_at_a_simulated_run(point, mask):
    """Each start, through the strategy, the simulator's devices and masks, ends at the same choices and models."""
    mixture = make_mixture(point, (0, 6))
    starts, rates = starts_of(point, 2, [0.5, 0.1])
    batch = Batch(mixture, starts, rates, masks(point.d, mask))
    for _ in range(25):
        batch.step()
    population = Population(tuple(Shard(x.numpy(), y.numpy()) for x, y in zip(mixture.x, mixture.y, strict=True)))
    settings = {"k": str(point.k), "option": "gradient"}
    for r, rate in enumerate(rates.tolist()):
        local = LocalTraining(epochs=0, steps=1, batch_size=0, lr=rate)
        options = paper_options(rounds=25, local=local, mode=mask, evaluate_every=0)
        done = simulate("ifca", settings, population, Linear(point.d), options, start=starts[r].numpy())
        thetas = np.stack([done.thetas[j] for j in range(point.k)])
        np.testing.assert_allclose(batch.models[r].numpy(), thetas, atol=1e-5)
        assert batch.choices[r].tolist() == list(done.clusters.values())


def test_a_mixing_mask_is_refused():
    """The batch gathers moves by a permutation; a rotation has none."""

    class Mixing:
        def apply(self, vector, out):
            out[:] = vector[::-1] / 2

    with pytest.raises(ValueError, match="supports only masks that permute coordinates"):
        permutation_of(Mixing(), 6)


def test_dropped_starts_leave_the_others():
    """And one that overflows ends at infinity."""
    rates = starts_of(SMALL, 1, [1e6, 0.1])
    ended = run_starts(make_mixture(SMALL, (0, 0)), *rates, iterations=60, threshold=0.06)
    assert ended.distances[0] == torch.inf
    assert torch.isfinite(ended.distances[1])
    assert int(ended.iterations[1]) == 60
    mixture = make_mixture(SMALL, (0, 4))
    starts, rates = starts_of(SMALL, 3, [0.5])
    batch, whole = Batch(mixture, starts, rates), Batch(mixture, starts, rates)
    for one in (batch, whole):
        one.step()
    batch.keep(torch.tensor([True, False, True]))
    for one in (batch, whole):
        one.step()
    torch.testing.assert_close(batch.models, whole.models[[0, 2]])
    assert torch.equal(batch.choices, whole.choices[[0, 2]])


def test_starts_are_zeros_and_ones():
    starts = random_starts(3, 2, 50, (7,))
    assert starts.shape == (3, 2, 50)
    assert set(starts.flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(starts, random_starts(3, 2, 50, (7,)))
    assert not torch.equal(starts, random_starts(3, 2, 50, (8,)))


def test_the_first_success_ends_all_starts():
    """One start at the truth has settled at the first check."""
    mixture = make_mixture(SMALL, (0, 5))
    starts, rates = starts_of(SMALL, 2, [0.1])
    starts[0] = mixture.truth
    common = {"iterations": 60, "threshold": 0.5, "settle": True}
    alone = run_starts(mixture, starts, rates, **common)
    ended = run_starts(mixture, starts, rates, **common, first_success=True)
    assert ended.distances[0] <= 0.5
    assert ended.iterations.tolist() == [int(alone.iterations[0])] * 2
    assert int(alone.iterations[1]) >= int(ended.iterations[1])
