"""Forged means, which a device's own checks judge, a false count, and the keys of one device."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.insiders import _false_count, answer, collusion, signs
from shoal_lab.bench.attacks.lab import device_model, signed_plan, spiked
from shoal_lab.bench.attacks.places import of_each

from crypto.mask.modes.registry import MODES
from shoal.errors import UntrustedError
from tests.helpers.cases import with_long

pytestmark = pytest.mark.torch
MASKS = [mode for mode in MODES if mode != "none"]


def test_a_device_checks_forged_means(lab):
    """Too long an offset and too few contributors are refused."""
    plan, spike = signed_plan(lab, "permutation"), spiked(lab.length, 7)
    assert np.count_nonzero(device_model(lab, "permutation", spike) != lab.origin) == 1
    with pytest.raises(UntrustedError, match="is allowed for one step"):
        device_model(lab, "permutation", np.full(lab.length, 10 * plan.recipe.norm_limit, np.float32))
    with pytest.raises(UntrustedError, match="a mean of 2 devices"):
        device_model(lab, "permutation", spike, contributors=2)


def test_features_follow_the_coordinate():
    """And not its position or sign; those of an update of zeros are finite."""
    delta, order = np.array([0.0, -3.0, 4.0, 0.0], np.float32), np.array([2, 0, 3, 1])
    found = signs(delta, 0.5, 1)
    np.testing.assert_allclose(found, [0.5, np.log(5), np.log(4), 0.5, np.log(3 / 5)], atol=1e-8)
    np.testing.assert_allclose(signs(-delta[order], 0.5, 3), found)
    assert np.isfinite(signs(np.zeros(3, np.float32), 1.0, 0)).all()


def test_every_tensor_is_probed_alike():
    truth = np.repeat([0, 1, 2], [100, 5, 50])
    found = of_each(truth, np.random.default_rng(0), 10)
    assert np.bincount(truth[found]).tolist() == [10, 5, 10]
    assert len(set(found.tolist())) == 25


def test_answer_has_the_reported_loss(lab):
    """From the forged model, rounded."""
    batch = lab.pick("a test", 40)
    _, loss = answer(lab, lab.origin, batch)
    _, other = answer(lab, lab.origin + spiked(lab.length, lab.length - 1), batch)
    assert round(loss, 4) == loss != other


@pytest.mark.parametrize("mode", with_long(MODES, "rotation"))
def test_a_false_count_shows_anothers_update(lab, mode):
    """A true mean of three shows hardly any coordinate."""
    result = _false_count(lab, mode)
    assert result.success > 0.99
    assert result.chance < 0.3


@pytest.mark.parametrize("mode", MASKS)
def test_a_key_opens_its_round_alone(lab, mode):
    """Under one key a run it opens the other round too; a made-up key opens nothing."""
    share, _, *rounds = collusion(lab, mode)
    assert float(share.note.split("key ")[1].split(";")[0]) < 0.05
    other = {r.keys: float(r.note.split()[-1]) for r in rounds}
    assert all(r.success > 0.99 for r in rounds)
    assert other["run"] > 0.99
    assert other["round"] < 0.1
