"""The simulator holds the models of all devices: a fresh mask in each round changes neither clusters nor models."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shoal.errors import IntegrityError
from tests.helpers.simulations import NETWORK
from tests.unit.shoal.simulation.engine.test_simulate import MINI, assert_same_models, figures, population, run

pytestmark = pytest.mark.torch
FAR = dataclasses.replace(MINI, epochs=10, momentum=0.0, prox_mu=0.0)
"""Long training: devices move from one centre of FeSEM to another."""
CASES = {
    "fedavg": ("fedavg", {}, {}),
    "fedavg, sums": ("fedavg", {}, {"deferred": True, "robust": "off"}),
    "ifca": ("ifca", {"k": "2", "restarts": "2", "restart_rounds": "2"}, {}),
    "ifca, sums": ("ifca", {"k": "2"}, {"deferred": True, "robust": "off"}),
    "sharing": ("ifca", {"k": "2"}, {"segments": (("shared", 54), ("cluster", 28))}),
    "cfl": ("cfl", {"warm_up": "1", "eps1": "0.9", "margin": "0.01"}, {}),
    "alg-5": ("cfl", {"validate": "off", "eps1": "0.9", "cool_down": "1"}, {}),
    "fedgroup": ("fedgroup", {"groups": "2", "alpha": "5", "eta_g": "0.05"}, {}),
    "one-shot": ("one-shot", {"k": "2"}, {}),
    "local": ("local", {}, {"min_contributors": 1}),
    "fesem": ("fesem", {"k": "2"}, {"local": FAR}),
}


@pytest.mark.parametrize(("mask", "tolerance"), [("permutation", 0.0), ("rotation", 2e-5)])
@pytest.mark.parametrize("case", CASES)
def test_masks_change_nothing(case, mask, tolerance):
    """The same clusters, histories and models as in the clear, bit for bit under a permutation."""
    algorithm, settings, options = CASES[case]
    clear, masked = (
        run(algorithm, settings, **{"local": MINI, **options}, rounds=6, mode=mode) for mode in ("none", mask)
    )
    assert masked.workforce.models.key_id != clear.workforce.models.key_id
    assert masked.clusters == clear.clusters
    assert [(r, e.kind) for r, e in masked.events] == [(r, e.kind) for r, e in clear.events]
    for a, b in zip(figures(clear), figures(masked), strict=True):
        if mask == "permutation":
            assert dataclasses.replace(b, norms=None) == dataclasses.replace(a, norms=None)
        assert (a.sizes, a.ari, a.accuracy) == (b.sizes, b.ari, b.accuracy)
        np.testing.assert_allclose(b.norms or (), a.norms or (), rtol=1e-4)
    assert_same_models(clear, masked, tolerance)


def test_no_two_rounds_have_one_mask():
    """Nor two seeds."""
    seen = []
    for seed in (3, 4):
        run("fedavg", mode="rotation", seed=seed, watch=lambda o: seen.append({c.key_id for c in o.contributions}))
    assert all(len(ids) == 1 for ids in seen)
    assert len(set().union(*seen)) == len(seen) == 8


def test_devices_hold_named_states_only():
    """Devices hold only states that the strategy names."""
    result = run("ifca", {"k": "2", "restarts": "3", "restart_rounds": "2"}, mode="permutation")
    held = result.workforce.models.held
    assert len(held.vectors) == 2
    assert {round_ for _, round_ in held.names.values()} == {result.all_rounds}
    assert held.vectors.keys() == held.names.keys()


def test_unheld_model_is_refused():
    """A model that devices do not hold is refused."""
    result = run("fedavg")
    plan = result.final_plan()
    moved = dataclasses.replace(plan, models={0: plan.models[0].moved(np.ones(NETWORK.length, np.float32), 1, 5)})
    with pytest.raises(IntegrityError, match="do not hold"):
        result.workforce.theta(moved, 0)


def test_watch_sees_the_rounds_first_models():
    """Devices hold them no more once the round is closed."""
    before = []
    result = run("fedavg", rounds=3, watch=lambda o: before.append(o.workforce.theta(o.plan, 0)))
    shorter = [run("fedavg", rounds=n).thetas[0] for n in (1, 2)]
    for seen, ended in zip(before[1:], shorter, strict=True):
        np.testing.assert_array_equal(seen, ended)
    assert not np.array_equal(before[-1], result.thetas[0])


@pytest.mark.parametrize("deferred", [False, True])
def test_devices_measure_distances_of_fesem(deferred):
    """They move between centres, and the aggregator needs no more than means."""
    options = {"local": FAR, "rounds": 8, "participation": 0.7, "seed": 5, "robust": "off"}
    clear = run("fesem", {"k": "2"}, **options)
    masked = run("fesem", {"k": "2"}, mode="rotation", deferred=deferred, **options)
    assert any(e.kind == "reassigned" for _, e in clear.events)
    assert masked.events == clear.events
    assert masked.clusters == clear.clusters
    assert_same_models(clear, masked, 2e-5)


@pytest.mark.parametrize("start", ["mean", "origin"])
@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
def test_newcomers_are_placed_under_masks(mask, start):
    """Newcomers of fedgroup are placed by direction under every mask."""
    data = population()
    late = data.names[3]
    settings = {"groups": "2", "alpha": "5", "start": start}
    result = run("fedgroup", settings, data, rounds=6, arrivals={late: 4}, mode=mask)
    groups = dict(zip(data.names, data.groups, strict=True))
    (group,) = {result.clusters[d] for d in data.names if groups[d] == groups[late] and d != late}
    (detail,) = [e.detail for _, e in result.events if e.kind == "newcomers"]
    assert detail == {"groups": {late: group}, "by": "direction"}
    assert result.clusters[late] == group


def test_clear_updates_have_no_mask():
    result = run("cfl", {"validate": "off", "eps1": "0.9"}, rounds=5)
    assert result.workforce.models.mask is None
    assert set(result.workforce.models.key_id) == {0}
    assert np.isfinite(next(iter(result.thetas.values()))).all()
