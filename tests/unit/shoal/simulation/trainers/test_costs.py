"""The counts of a trainer's work, and the estimate of its time."""

import dataclasses

import numpy as np
import pytest

from shoal.simulation.trainers import costs
from shoal.simulation.trainers.costs import COSTS, TERMS, Work, fits, seconds
from shoal.simulation.trainers.networks import Linear, OneHidden
from tests.helpers.trainers import CLIPPED, PLAIN

pytestmark = pytest.mark.torch

NETWORK = OneHidden(20, 6, 3)
BLOCKS = [np.array([9, 7]), np.array([4])]


def work(**changes):
    return Work.of(NETWORK, BLOCKS, dataclasses.replace(PLAIN, **changes), scored=False)


def test_mini_batches_are_counted_by_steps_with_padding():
    """Two epochs of batches of 4: 3 and 2 batches a pass in the first block, 1 in the second."""
    found = work(epochs=2, batch_size=4)
    assert (found.blocks, found.devices, found.block_steps, found.steps) == (2, 3, 6 + 2, 6 + 4 + 2)
    assert found.visits == 4 * (6 + 4 + 2)
    assert (found.samples, found.pairs) == (9 + 9 + 4, 2 * 81 + 16)
    assert found.coefficients == 9 * (6 + 4) + 4 * 2
    assert (found.inputs, found.out, found.behind, found.length) == (20, 6, 18, NETWORK.length)


def test_full_batches_visit_every_sample_at_each_step():
    found = work(steps=5)
    assert (found.block_steps, found.steps, found.visits) == (10, 15, 5 * (9 + 9 + 4))


def test_a_number_of_steps_is_not_a_number_of_passes():
    assert work(epochs=0, steps=7, batch_size=4).steps == 21


def test_the_time_is_the_sum_of_the_terms():
    counted = TERMS["batched"](work())
    prices = {"batched": {term: float(i) for i, term in enumerate(counted)}}
    assert seconds("batched", work(), prices) == pytest.approx(
        1e-9 * sum(i * n for i, n in enumerate(counted.values()))
    )


@pytest.mark.parametrize("name", TERMS)
def test_every_term_that_has_a_price_is_counted(name):
    """And more work never costs less."""
    small, large = (TERMS[name](work(epochs=epochs, batch_size=4)) for epochs in (1, 3))
    many = TERMS[name](Work.of(NETWORK, [np.array([99])], PLAIN, scored=False))
    assert COSTS[name].keys() <= small.keys() | many.keys()
    assert all(large[term] >= small[term] for term in small)
    assert seconds(name, work(epochs=3, batch_size=4)) > seconds(name, work(epochs=1, batch_size=4)) > 0


def test_known_outputs_of_the_first_layer_save_a_product_and_lost_kernels_cost_one(monkeypatch):
    known = Work.of(NETWORK, BLOCKS, PLAIN, scored=True)
    product = TERMS["dual"](work())["product"]
    assert TERMS["dual"](known)["product"] == product / 2
    monkeypatch.setattr(costs, "KERNEL_BYTES", 4)
    assert TERMS["dual"](work())["product"] == product + known.pairs * known.inputs


def test_many_samples_have_another_form_stepwise():
    few, many = (Work.of(Linear(3), [np.array([n])], PLAIN, scored=False) for n in (6, 7))
    assert few.few
    assert not many.few
    assert TERMS["stepwise"](few).keys() != TERMS["stepwise"](many).keys()


def test_trainers_fit_the_work_they_can_take():
    sizes, mini = np.array([20, 5]), dataclasses.replace(PLAIN, epochs=1, batch_size=4)

    def fit(name, local, sizes=sizes, on_cpu=True):
        return fits(name, NETWORK, sizes, local, on_cpu=on_cpu)

    assert fit("batched", CLIPPED)
    assert not fit("dual", CLIPPED)
    assert fit("dual", mini)
    assert not fit("dual", mini, np.array([21]))
    assert fit("stepwise", mini)
    assert not fit("stepwise", mini, on_cpu=False)
    assert not fit("stepwise", PLAIN)
    assert not fit("stepwise", dataclasses.replace(mini, momentum=0.1))
