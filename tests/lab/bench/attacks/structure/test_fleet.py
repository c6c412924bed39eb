"""The simulated fleet applies a device's own checks, and its batched gradient equals the fleet's own training."""

from types import SimpleNamespace

import numpy as np
import pytest
from shoal_lab.bench.attacks.lab import LIFETIMES, ONE_STEP, FleetKeys
from shoal_lab.bench.attacks.structure.fleet import MaskedFleet, Network, analysed_rounds, beyond, fleet_sizes

from shoal.errors import UntrustedError

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("batch", [1, 7])
def test_updates_equal_real_training(lab, batch):
    """Also the zeros of dead units, which attacks read."""
    network = Network.of(lab)
    assert network.length == lab.length
    parts = [lab.pick(f"network {i}", batch) for i in range(4)]
    x, y = np.stack([p.x for p in parts]), np.stack([p.y for p in parts])
    made = network.updates(lab.origin, x, y)
    real = np.stack([lab.update(p, ONE_STEP) for p in parts])
    assert np.allclose(made, real, atol=1e-7)
    assert np.mean((made == 0) == (real == 0)) > 0.999
    assert np.std(network.origin(np.random.default_rng(1))) == pytest.approx(np.std(lab.origin), rel=0.05)


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_mean_beyond_plans_limit_is_refused(lab, lifetime):
    fleet = MaskedFleet(lab, "rotation", lifetime, 3)
    with pytest.raises(UntrustedError, match="is allowed for one step"):
        fleet.announce(np.full(lab.length, 100.0, np.float32))
    assert fleet.round == 1
    assert np.array_equal(fleet.held, fleet.origin)


def test_clear_energies_lie_in_their_units(lab):
    """A masked basis vector has all of its energy in one unit, under the right key alone."""
    fleet = MaskedFleet(lab, "rotation", "round", 3)
    masked = fleet.keys.masked(np.eye(lab.length, dtype=np.float32)[[0, lab.length - 1]], 1)
    energies = fleet.energies(masked, 1)
    assert energies[0, 0] == pytest.approx(1, abs=1e-4)
    assert energies[1].sum() == pytest.approx(0, abs=1e-4)
    fleet.keys = FleetKeys(lab, "rotation", "round", lab.length, "another")
    assert fleet.energies(masked, 1).max() < 0.1


def test_sizes_of_a_quick_and_of_a_full_run():
    def a_lab(*, quick, length=4810):
        return SimpleNamespace(quick=quick, length=length, trials=lambda full, few: few if quick else full)

    small, full = a_lab(quick=True), a_lab(quick=False)
    assert fleet_sizes(small, many=True) == (15, 100)
    assert fleet_sizes(full) == (15, 100, 450)
    assert fleet_sizes(full, many=True) == (15, 100, 450, 500, 2000)
    assert fleet_sizes(a_lab(quick=True, length=101_770)) == (), "large models are not attacked"
    assert (analysed_rounds(full, 450)[-1], len(analysed_rounds(full, 450))) == (200, 8)
    assert (analysed_rounds(full, 2000), analysed_rounds(small, 15)[-1]) == ([2], 12)
    assert (beyond(full, 450), "tenth" in beyond(full, 500)) == ("", True)


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_uploads_are_masked_under_rounds_key(lab, lifetime):
    """Means add up under fresh keys and replace each other under one."""
    fleet, mean = MaskedFleet(lab, "permutation", lifetime, 5), np.full(lab.length, 0.01, np.float32)
    for round_ in (1, 2, 3):
        sent = fleet.uploads()
        assert fleet.round == round_
        assert np.array_equal(fleet.keys.unmasked(sent, round_), fleet.clear)
        fleet.announce(mean)
    assert np.allclose(fleet.held - fleet.origin, {"run": 1, "round": 3}[lifetime] * 0.01, atol=1e-6)
