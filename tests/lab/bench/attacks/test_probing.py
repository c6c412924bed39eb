"""Probes with forged means: the answers' features, the places that are probed, and a false count."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.probing import SPIKE, _false_count, _places, _spike, answer, signs

from crypto.mask.modes.registry import MODES

pytestmark = pytest.mark.torch


def test_features_follow_the_changed_coordinate_and_not_its_position():
    delta = np.array([0.0, -3.0, 4.0, 0.0], np.float32)
    order = np.array([2, 0, 3, 1])
    found = signs(delta, 0.5, 1)
    np.testing.assert_allclose(found, [0.5, np.log(5), np.log(4), 0.5, np.log(3 / 5)], atol=1e-8)
    np.testing.assert_allclose(signs(delta[order], 0.5, 3), found)
    np.testing.assert_allclose(signs(-delta, 0.5, 1), found)


def test_an_update_of_zeros_has_finite_features():
    assert np.isfinite(signs(np.zeros(3, np.float32), 1.0, 0)).all()


def test_every_tensor_is_probed_alike_and_no_place_twice():
    truth = np.repeat([0, 1, 2], [100, 5, 50])
    found = _places(truth, np.random.default_rng(0), 10)
    assert np.bincount(truth[found]).tolist() == [10, 5, 10]
    assert len(set(found.tolist())) == 25


def test_a_spike_is_one_coordinate(lab):
    spike = _spike(lab, 7)
    assert spike[7] == SPIKE
    assert np.count_nonzero(spike) == 1
    assert (spike.shape, spike.dtype) == ((lab.length,), np.float32)


def test_an_answer_has_the_loss_as_it_is_reported(lab):
    """From the forged model, rounded."""
    batch = lab.pick("a test", 40)
    delta, loss = answer(lab, lab.origin, batch)
    assert round(loss, 4) == loss
    assert delta.shape == (lab.length,)
    _, other = answer(lab, lab.origin + _spike(lab, lab.length - 1), batch)
    assert other != loss


@pytest.mark.parametrize("mode", MODES)
def test_a_false_count_shows_a_device_anothers_update(lab, mode):
    """A true mean of three shows it hardly any coordinate."""
    result = _false_count(lab, mode)
    assert result.success > 0.99
    assert result.chance < 0.3
    assert result.works
