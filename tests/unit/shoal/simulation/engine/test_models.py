"""The simulator holds the models of all devices: a fresh mask in each round changes neither clusters nor models.

Simulated links: what a device sends and receives is what a fleet's would, and bytes are counted.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shoal.errors import ConfigError, IntegrityError
from shoal.protocol.precision.codec import decode, encode
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.precision.seeds import mean_seed
from shoal.simulation.engine.models import Links
from tests.helpers.masks import key_of
from tests.helpers.plans import D, run_plan
from tests.helpers.simulations import NETWORK
from tests.unit.shoal.simulation.engine.test_simulate import MINI, assert_same_models, figures, population, run

pytestmark = pytest.mark.torch
FAR = dataclasses.replace(MINI, epochs=10, momentum=0.0, prox_mu=0.0)
"""Long training: devices move from one centre of FeSEM to another."""
CASES = {
    "fedavg": ("fedavg", {}, {}),
    "ifca": ("ifca", {"k": "2", "restarts": "2", "restart_rounds": "2"}, {}),
    "sharing": ("ifca", {"k": "2"}, {"segments": (("shared", 54), ("cluster", 28))}),
    "cfl": ("cfl", {"warm_up": "1", "eps1": "0.9", "margin": "0.01"}, {}),
    "alg-5": ("cfl", {"validate": "off", "eps1": "0.9", "cool_down": "1"}, {}),
    "fedgroup": ("fedgroup", {"groups": "2", "alpha": "5", "eta_g": "0.05"}, {}),
    "one-shot": ("one-shot", {"k": "2"}, {}),
    "local": ("local", {}, {"min_contributors": 1}),
    "fesem": ("fesem", {"k": "2"}, {"local": FAR}),
}


@pytest.mark.parametrize("mask", ["permutation", "rotation"])
@pytest.mark.parametrize("case", CASES)
def test_masks_change_nothing(case, mask):
    algorithm, settings, options = CASES[case]
    clear, masked = (
        run(algorithm, settings, **{"local": MINI, **options}, rounds=6, mode=mode) for mode in ("none", mask)
    )
    assert masked.clusters == clear.clusters
    assert [(r, e.kind) for r, e in masked.events] == [(r, e.kind) for r, e in clear.events]
    for a, b in zip(figures(clear), figures(masked), strict=True):
        assert (a.sizes, a.ari, a.accuracy) == (b.sizes, b.ari, b.accuracy)
    assert_same_models(clear, masked, 2e-5)


def test_no_two_rounds_have_one_mask():
    seen = []
    run("fedavg", mode="rotation", watch=lambda o: seen.append({c.key_id for c in o.contributions}))
    assert all(len(ids) == 1 for ids in seen)
    assert len(set().union(*seen)) == len(seen) == 4


def test_deferred_means_are_masked():
    """Sums that are masked once give the same models as single updates."""
    one, other = (run("ifca", mode="rotation", deferred=deferred, robust="off") for deferred in (False, True))
    assert_same_models(one, other, 2e-5)


def test_seeds_change_the_masks():
    ids = []
    for seed in (3, 4):
        run(
            "fedavg",
            rounds=1,
            seed=seed,
            mode="permutation",
            watch=lambda o: ids.append(o.contributions[0].key_id),
        )
    assert len(set(ids)) == 2


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


UPDATE = np.linspace(-1, 1, D, dtype=np.float32)


def links_of(up="int8", down="int8"):
    return Links(run_plan(precision_up=up, precision_down=down))


def test_residual_joins_the_next_update():
    """An update is decoded and its residual is added to the next of the same model."""
    links, key = links_of(), key_of("permutation", D)
    first = links.update(UPDATE, key, device="a", model=0, phase=1, round_=1)
    (residual,) = links._residuals.values()
    links.exact = {}
    links.update(UPDATE, key, device="a", model=0, phase=1, round_=2)
    assert np.allclose(np.sort(links.exact["a"]), np.sort(UPDATE + residual.vector()))
    assert links.up == (2 * encoded_bytes(D, "int8"), 2)
    other = links_of().update(UPDATE, key, device="a", model=0, phase=1, round_=1)
    assert (first == other).all()
    links.update(UPDATE, key, device="a", model=1, phase=1, round_=3)
    assert np.allclose(np.sort(links.exact["a"]), UPDATE), "another model: nothing is added"


def test_float32_leaves_vectors_as_they_are():
    links = links_of("float32", "float32")
    assert (links.update(UPDATE, None, device="a", model=0, phase=1, round_=1) == UPDATE).all()
    assert links.mean(UPDATE, model=0, round_=1) is UPDATE
    assert links.up == (4 * D, 1)
    assert not links._residuals


def test_a_mean_is_what_every_device_decodes():
    found = links_of().mean(UPDATE, model=3, round_=2)
    seed = mean_seed(run_plan().run_id, 2, 3)
    assert (found == decode(encode(UPDATE, "int8", seed), D, "int8")).all()


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precision_ends_near_float32(precision):
    """A run in another precision ends near that of float32."""
    exact = run("ifca", {"k": "2"}, mode="rotation")
    rounded = run("ifca", {"k": "2"}, mode="rotation", precision_up=precision, precision_down=precision)
    assert rounded.clusters == exact.clusters
    assert abs(figures(rounded)[-1].accuracy - figures(exact)[-1].accuracy) < 5
    up, down = rounded.workforce.models.links.up, rounded.workforce.models.links.down
    whole = exact.workforce.models.links.up
    assert up[1] == whole[1]
    assert up[0] < 0.6 * whole[0]
    assert down[1] > 0


def test_a_run_with_residuals_is_not_stored(tmp_path):
    with pytest.raises(ConfigError, match="residuals"):
        run("fedavg", precision_up="int8", checkpoint=tmp_path / "run")
