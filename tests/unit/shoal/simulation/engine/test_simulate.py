"""Simulated runs of the real strategies: masks, deferred means, numbering, evaluation, and the loopback fleet as witness."""

import dataclasses
import json

import numpy as np
import pytest
from shoal_lab.loopback.fleet import draw_origins

from aggregator.rounds.standstill import STANDS_STILL
from aggregator.strategies.base import mean_update
from aggregator.strategies.registry import make_strategy
from edge_client.learning.data import split
from shoal.errors import ConfigError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.simulate import simulate
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import Softmax, origins
from tests.helpers.fleets import CLASSES, INPUTS, grouped_data, make_fleet
from tests.helpers.simulations import FULL, NETWORK, population

pytestmark = pytest.mark.torch
MINI = LocalTraining(epochs=2, steps=0, batch_size=8, lr=0.2, momentum=0.5, prox_mu=0.1)


def run(algorithm="ifca", settings=None, data=None, watch=None, **options):
    settings = {"k": "2"} if settings is None and algorithm == "ifca" else settings or {}
    fields = {"rounds": 4, "local": FULL, "seed": 3, **options}
    return simulate(algorithm, settings, data or population(), NETWORK, sim_options(**fields), watch=watch)


def figures(result):
    return [dataclasses.replace(r, seconds_cpu=0.0, events=()) for r in result.history]


def assert_same_models(one, other, tolerance=0.0):
    assert one.thetas.keys() == other.thetas.keys()
    for model, theta in one.thetas.items():
        np.testing.assert_allclose(theta, other.thetas[model], rtol=0, atol=tolerance)


@pytest.mark.parametrize("local", [FULL, MINI], ids=["full", "mini"])
@pytest.mark.parametrize("algorithm", ["fedavg", "ifca"])
def test_every_trainer_gives_the_same_run(algorithm, local):
    """Loop, batches and dual form, stored or summed, with unequal sizes: equal clusters, models within 1e-5."""
    expected = run(algorithm, local=local, trainer="loop", deferred=False, robust="off")
    for trainer in ("auto", "dual"):
        for deferred in (False, True):
            found = run(algorithm, local=local, trainer=trainer, deferred=deferred, robust="off")
            assert found.clusters == expected.clusters
            assert_same_models(found, expected, 1e-5)
            for a, b in zip(found.history, expected.history, strict=True):
                assert (a.accuracy, a.purity, a.sizes) == (b.accuracy, b.purity, b.sizes)
                assert a.loss == pytest.approx(b.loss, abs=2e-4)


def test_the_seed_decides_the_run():
    """The same seed gives the same bits; another gives another run."""
    first, again, other = (run(local=MINI, seed=s, participation=0.5) for s in (3, 3, 4))
    assert figures(first) == figures(again)
    assert_same_models(first, again)
    assert not np.array_equal(first.thetas[0], other.thetas[0])


def test_only_drawn_devices_are_ordered():
    """Half of ten devices upload in a round, not always the same ones."""
    seen = []
    simulate(
        "fedavg",
        {},
        population(),
        NETWORK,
        sim_options(rounds=4, local=FULL, participation=0.5),
        watch=lambda o: seen.append(tuple(c.device for c in o.contributions)),
    )
    assert [len(s) for s in seen] == [5] * 4
    assert len(set(seen)) > 1


@pytest.mark.parametrize("algorithm", ["fedavg", "cfl", "fedgroup"])
def test_later_devices_are_unknown_before(algorithm):
    """Two of ten arrive in round 3: they have no orders, clusters or tests before, and take part from then on."""
    late, seen = {"dev-0008": 3, "dev-0009": 3}, []
    settings = {"fedgroup": {"groups": "2", "alpha": "4"}, "cfl": {"warm_up": "9"}}.get(algorithm, {})
    common = {"local": FULL, "count": "all", "evaluate_every": 1}
    options = sim_options(rounds=5, arrivals=late, **common)
    result = simulate(algorithm, settings, population(), NETWORK, options, watch=seen.append)
    for observed in seen:
        ordered, clusters = set(observed.plan.assignments), observed.outcome.clusters
        assert late.keys() <= ordered if observed.plan.round >= 3 else not late.keys() & (ordered | clusters.keys())
    assert len(result.final.names) == 10
    data = population()
    alone = Population(data.train[:8], data.validation[:8], data.test[:8], data.groups[:8])
    before = simulate(algorithm, settings, alone, NETWORK, sim_options(rounds=2, **common))
    assert figures(before) == figures(result)[:2]


def test_other_starts_rounds_are_apart():
    """Three starts of three rounds: the best one's rounds are counted from 1, with the accuracy of its own models."""
    result = run(settings={"k": "2", "restarts": "3", "restart_rounds": "3"}, rounds=6)
    assert [r.round for r in result.history] == [1, 2, 3, 4, 5, 6]
    assert (result.restart_rounds, result.all_rounds) == (6, 12)
    kept = result.history[2].plan_round // 3 - 1
    assert [r.plan_round for r in result.history] == [3 * kept + 1, 3 * kept + 2, 3 * kept + 3, 10, 11, 12]
    first = origins(NETWORK, 6, 3)[2 * kept : 2 * kept + 2]
    options = sim_options(rounds=3, local=FULL, seed=3)
    alone = simulate("ifca", {"k": "2"}, population(), NETWORK, options, start=first)
    for a, b in zip(result.history, alone.history, strict=False):
        assert (a.loss, a.accuracy, a.purity, a.sizes) == (b.loss, b.accuracy, b.purity, b.sizes)
    assert all(r.accuracy is not None for r in result.history)
    assert result.history[2].sizes == result.history[3].sizes
    assert result.final.accuracy == result.history[-1].accuracy
    assert result.best_accuracy == max(r.accuracy for r in result.history)


def test_trials_count_only_if_asked():
    """CFL tries a split in rounds without training in phase TRAIN, so ten counted rounds take more than ten."""
    settings = {"cool_down": "1", "eps1": "0.9"}
    some = run("cfl", settings, rounds=10, local=FULL)
    every = run("cfl", settings, rounds=10, local=FULL, count="all")
    assert len(some.history) == len(every.history) == every.all_rounds == 10
    assert some.all_rounds > 10


def test_probes_take_the_place_of_own_tests():
    """With probes, the protocol argmin is measured on these and not on the devices' test shards."""
    data = population()
    probed = dataclasses.replace(data, probes=data.test[:3], probe_groups=(0, 1, 0))
    result = run(data=probed, protocol="argmin")
    assert len(result.final.tested) == 3
    assert result.final.names == ()


def test_no_tests_no_accuracy():
    """There is nothing to evaluate, and that is not zero percent."""
    data = population()
    result = run(data=Population(data.train))
    assert result.final is None
    assert result.history[-1].accuracy is None
    assert result.history[-1].purity is None


def test_updates_beyond_limit_are_left_out():
    """A limit below the longest update leaves its device out of the mean, and the round names it."""
    free = run("fedavg", rounds=1, norm_screen=False)
    longest = free.history[0].norms[1]
    seen = []
    limited = run("fedavg", rounds=1, norm_screen=False, norm_limit=0.999 * longest, watch=seen.append)
    assert free.history[0].refused_norm == {}
    assert list(limited.history[0].refused_norm.values()) == [longest]
    others = [c for c in seen[0].contributions if c.norm < longest]
    assert len(others) == 9
    moved = limited.thetas[0] - origins(NETWORK, 1, limited.run.seed)[0]
    np.testing.assert_allclose(
        moved, mean_update(others, limited.run.recipe.weighting, limited.run.recipe.weight_cap), atol=1e-6
    )


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"k": "2"}, {}, "no setting"),
        ({}, {"arrivals": {"dev-0010": 2}}, "dev-0010"),
        ({}, {"arrivals": dict.fromkeys(population().names, 2)}, "no device is there"),
        ({}, {"deferred": True}, "deferred sums hold no single updates"),
        ({}, {"participation": 0.2, "min_contributors": 3}, "2 devices take part in a round, and a mean takes 3"),
    ],
)
def test_unfit_options_are_refused(settings, options, message):
    """The strategy checks a simulated run as it checks a signed one."""
    with pytest.raises(ConfigError, match=message):
        run("fedavg", settings, **options)


def test_attackers_uploads_are_named():
    """An attack changes uploads before they are screened and attackers are named."""

    def reversed_by_one(given, workforce):
        first = workforce.population.names[0]
        return [dataclasses.replace(c, vector=-c.row) if c.device == first else c for c in given]

    data = population(groups=1)
    for mask in ("none", "rotation"):
        options = sim_options(rounds=4, local=FULL, seed=3, mode=mask)
        found = simulate("fedavg", {}, data, NETWORK, options, tamper=reversed_by_one)
        assert [(n, e.detail["device"]) for n, e in found.events] == [(3, data.names[0])]
    options = sim_options(rounds=1, local=FULL, seed=3)
    giant = simulate(
        "fedavg",
        {},
        data,
        NETWORK,
        options,
        tamper=lambda given, _: [dataclasses.replace(given[0], norm=1e3 * given[0].norm), *given[1:]],
    )
    assert list(giant.history[0].refused_norm) == [data.names[0]]


def torch_order(vector):
    """Return the hand-made task's vector, W (inputs, classes) first, with W (classes, inputs) as torch has it."""
    weight, bias = vector[: INPUTS * CLASSES], vector[INPUTS * CLASSES :]
    return np.concatenate([weight.reshape(INPUTS, CLASSES).T.reshape(-1), bias])


QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
ALONE = LocalTraining(epochs=0, steps=12, batch_size=0, lr=0.8)
FORGETFUL = LocalTraining(epochs=0, steps=60, batch_size=0, lr=0.8)
EAGER = {"eps1": "0.9", "cool_down": "1"}
GROUPS = {"groups": "2", "alpha": "2", "eta_g": "0.05"}
WITNESSED = {
    "fedavg": ("fedavg", {}, 2, {"local": FULL, "participation": 0.7}, set()),
    "fedavg-batches": ("fedavg", {}, 2, {"local": MINI, "participation": 0.7}, set()),
    "ifca": ("ifca", {"k": "2"}, 2, {"local": FULL, "participation": 0.7}, set()),
    "ifca-batches": ("ifca", {"k": "2"}, 2, {"local": MINI, "participation": 0.7}, set()),
    "cfl-split": ("cfl", EAGER, 2, {"local": FULL, "rounds": 8}, {"trial-opened", "split"}),
    "cfl-refused": ("cfl", EAGER, 1, {"local": FULL, "rounds": 8}, {"trial-opened", "split-refused"}),
    "fedgroup": ("fedgroup", GROUPS, 2, {"local": QUICK, "pretrain": ALONE, "rounds": 5}, {"cold-start", "newcomers"}),
    "fesem": ("fesem", {"k": "2"}, 2, {"local": FORGETFUL, "rounds": 5}, {"reassigned"}),
    "one-shot": ("one-shot", {"k": "2"}, 2, {"local": QUICK, "pretrain": ALONE}, {"clustered"}),
}


def test_standing_cluster_is_an_event(monkeypatch):
    """One-shot clustering leaves two of ten devices alone in their group: no mean of three is ever made of them."""
    monkeypatch.setattr("aggregator.strategies.one_shot.join_small", lambda _similarity, labels, _least: labels)
    data = population(groups=(0,) * 8 + (1,) * 2)
    still = run("one-shot", {"k": "2"}, data=data, rounds=6, min_contributors=3)
    told = [(number, event) for number, event in still.events if event.kind == STANDS_STILL]
    ((number, event),) = told
    assert (number, event.detail["devices"]) == (3, 2)
    assert event.detail["reason"] == "it has 2 devices, and a mean takes 3"
    assert event in still.history[2].events
    moved = run("one-shot", {"k": "2"}, data=data, rounds=6, min_contributors=2)
    assert STANDS_STILL not in {event.kind for _, event in moved.events}


@pytest.mark.parametrize("case", WITNESSED)
def test_simulated_run_is_loopback_fleets(tmp_path, case):
    """The same plan, data and origins: same clusters and events in every round, and the same models to 1e-5."""
    algorithm, settings, groups, fields, expected = WITNESSED[case]
    data = grouped_data(6, groups)
    with make_fleet(tmp_path, data, algorithm=algorithm, settings=settings, **{"rounds": 4, **fields}) as fleet:
        records = fleet.run(600)
        plan = fleet.plan
        theirs = {name: torch_order(fleet.model(name).theta) for name in data}
        fleet_origins = draw(fleet, plan)
        shares = {name: split(batch, f"{plan.fleet}/{name}".encode()) for name, batch in data.items()}
    parts = [
        tuple(Shard(s.x, s.y) for s in (getattr(shares[d], p) for d in data)) for p in ("train", "validation", "test")
    ]
    force = Workforce(Population(*parts, names=tuple(data)), Softmax(INPUTS, CLASSES), plan, fleet_origins)
    strategy = make_strategy(plan, None, force.average)
    state = strategy.init(tuple(data))
    for round_ in range(1, plan.recipe.rounds + 1):
        state, round_plan = strategy.plan(state, round_, tuple(data))
        state, outcome = strategy.close(state, round_plan, force.carry_out(round_plan))
        state = force.models.relay(strategy, state, round_)
        assert dict(outcome.clusters) == records[round_ - 1]["clusters"]
        assert len(round_plan.assignments) == records[round_ - 1]["ordered"]
        ours = [{"round": e.round, "kind": e.kind, **e.detail} for e in outcome.events]
        assert len(ours) == len(records[round_ - 1]["events"])
        for event, recorded in zip(ours, records[round_ - 1]["events"], strict=True):
            assert_same_values(json.loads(json.dumps(event)), recorded)
    events = [e for r in records for e in r["events"]]
    assert expected <= {e["kind"] for e in events}
    assert {"direction"} == {e["by"] for e in events if e["kind"] == "newcomers"} or algorithm != "fedgroup"
    final = strategy.final(state, plan.recipe.rounds + 1, tuple(data))
    assert records[-1]["clusters"].keys() == data.keys()
    for name, model in records[-1]["clusters"].items():
        ours = force.theta(final, model)
        assert np.abs(ours - fleet_origins).max(axis=1).min() > 1e-2
        np.testing.assert_allclose(ours, theirs[name], rtol=1e-5, atol=1e-5)


def assert_same_values(one, other):
    """Assert that two JSON values are equal, but for the rounding of numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        pairs = [(one[k], other[k]) for k in one]
    elif isinstance(one, list):
        assert len(one) == len(other)
        pairs = list(zip(one, other, strict=True))
    else:
        assert one == (pytest.approx(other, abs=1e-4) if isinstance(one, float) else other)
        return
    for a, b in pairs:
        assert_same_values(a, b)


def draw(fleet, plan):
    """Return the origins that the fleet drew for itself, in torch's order."""
    return np.stack([torch_order(o) for o in draw_origins(fleet.bundle.manifest, plan.origins, 1)])


@pytest.mark.parametrize("setting", ["restarts", "restart_rounds"])
def test_setting_that_is_no_number_is_named(setting):
    with pytest.raises(ConfigError, match=f"setting {setting} is a whole number"):
        run(settings={"k": "2", setting: "many"})
