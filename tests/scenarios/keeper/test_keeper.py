"""Runs with a keeper: the aggregator learns sums of at least three updates, and no single one."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from shoal_lab.loopback.fleet import LoopbackError

import aggregator.rounds.held_models
import aggregator.sums
import edge_client.learning.update
import edge_client.run.jobs
from aggregator.keeper.memory import KeeperMemory
from aggregator.sums import FALSE_SHARE
from crypto.sums.ring import numbers_in
from shoal.protocol.requests import RequestAction
from shoal.task.data_declaration import DataDeclaration
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    CLASSES,
    INPUTS,
    grouped_data,
    make_fleet,
    reasons,
    restart_aggregator,
    restart_device,
    same_partition,
    thetas,
    truth_of,
)
from tests.helpers.tasks import logistic_bundle


@pytest.fixture
def sums(monkeypatch):
    """Integers of every update, and of every sum that was opened, as (devices, sum)."""
    made, opened = {}, []
    open_sum = aggregator.sums.CellOpener._sum

    def record(plan, announced, update):
        made[len(made)] = numbers_in(plan, announced, update)
        return made[len(made) - 1].copy()

    def opening(self, given, pads, figures):
        found = open_sum(self, given, pads, figures)
        opened.append((len(given), found[0]))
        return found

    monkeypatch.setattr(edge_client.learning.update, "numbers_in", record)
    monkeypatch.setattr(aggregator.sums.CellOpener, "_sum", opening)
    return made, opened


def fleet_of(root, stages, count=8, groups=1, **options):
    chosen = {"min_contributors": 3, "mode": "rotation", **options}
    return make_fleet(root, grouped_data(count, groups), stage=stages(root / "stage", count), **chosen)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_sums_are_exact(tmp_path, stages, sums, precision):
    made, opened = sums
    with fleet_of(tmp_path, stages, precision_up=precision) as fleet:
        fleet.run(60)
        assert fleet.finished
        assert [count for count, _ in opened] == [8, 8, 8]
        for at, (_, total) in enumerate(opened):
            assert (sum(made[i] for i in range(8 * at, 8 * at + 8)) == total).all()
        assert fleet.records()[-1]["tested"] == 800
        assert fleet.records()[-1]["device_accuracy"] == {} == fleet.records()[-1]["norms"]


@pytest.mark.parametrize(("precision", "apart"), [("float32", 1e-4), ("float16", 1e-2)])
def test_models_are_those_without(tmp_path, stages, precision, apart):
    alike = {"mode": "rotation", "robust": "off", "weighting": "uniform", "min_contributors": 3}
    with (
        fleet_of(tmp_path / "a", stages, precision_up=precision) as fleet,
        make_fleet(tmp_path / "b", grouped_data(8), **alike) as clear,
    ):
        fleet.run(60)
        clear.run(60)
        expected = thetas(clear)
        for name, theta in thetas(fleet).items():
            assert np.abs(np.frombuffer(theta, np.float32) - np.frombuffer(expected[name], np.float32)).max() < apart


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_fleet_that_has_learned_all(tmp_path, stages, precision):
    """Updates become a thousand times shorter from one round to the next, most of them nothing: no sum counts as spoilt."""
    data = grouped_data(8, inputs=3000, n=14)
    stage = stages(tmp_path / "stage", 8)
    options = {"mode": "rotation", "min_contributors": 3, "rounds": 6, "precision_up": precision}
    with make_fleet(tmp_path, data, bundle=logistic_bundle(3000, CLASSES), stage=stage, **options) as fleet:
        fleet.run(200)
        assert fleet.finished
        assert not [e for r in fleet.records() for e in r["events"] if e["kind"] in ("spoilt", "group-left-out")]
        assert all(r["contributed"] == 8 for r in fleet.records()[:6])


def test_device_in_other_steps_is_left_out(tmp_path, stages, monkeypatch):
    """An aggregator announces smaller steps to one device, so that its update would be most of the sum: it is not opened."""
    true, victim = edge_client.learning.update.carry_out, min(grouped_data(8))

    def told(context, announcement, *rest):
        if context.identity.name == victim and announcement.unit:
            announcement = dataclasses.replace(announcement, unit=announcement.unit / 1000)
        return true(context, announcement, *rest)

    monkeypatch.setattr(edge_client.run.jobs, "carry_out", told)
    with fleet_of(tmp_path, stages, precision_up="float16", rounds=3) as fleet:
        fleet.run(120)
        told = [event for r in fleet.records() for event in r["events"] if event.get("reason") == FALSE_SHARE]
        assert [(event["round"], event["devices"]) for event in told] == [(2, [victim]), (3, [victim])]


LOOKING = {
    "cfl": {"algorithm": "cfl", "rounds": 24},
    "fedgroup": {"algorithm": "fedgroup", "settings": {"groups": 2}, "rounds": 4},
    "one-shot": {"algorithm": "one-shot", "settings": {"k": 2}, "rounds": 4},
}


@pytest.mark.parametrize(
    ("algorithm", "precision"), [*((name, "float32") for name in LOOKING), ("cfl", "float16"), ("fedgroup", "float16")]
)
def test_looks_find_the_groups(tmp_path, stages, algorithm, precision):
    with fleet_of(tmp_path, stages, groups=2, precision_up=precision, **LOOKING[algorithm]) as fleet:
        fleet.run(400)
        assert same_partition(fleet.records()[-1]["clusters"], truth_of(8, 2))
        events = [event for record in fleet.records() for event in record["events"]]
        looks = [event for event in events if event["kind"] == "look"]
        assert 1 <= len(looks) <= 4
        assert looks[-1]["used"] == len(looks) == len(KeeperMemory.load(fleet.stage.keeper_dir).looks.begun)
        told = {name for event in events for name in event}
        assert not told & {"cross_max", "intra_min", "max_norm"}
        assert all(record["cosines"] is None for record in fleet.records())


@pytest.mark.parametrize(
    "options",
    [{"rounds": 4}, {"rounds": 4, "precision_up": "float16"}, {**LOOKING["cfl"], "rounds": 12}, LOOKING["fedgroup"]],
)
@pytest.mark.parametrize("seed", with_long(range(4), 0))
def test_any_party_may_be_killed(tmp_path, stages, seed, options):
    rng = random.Random(seed)
    with fleet_of(tmp_path, stages, groups=2, **options) as fleet:
        steps = 0
        while not fleet.finished and steps < 4000:
            fleet.step()
            steps += 1
            if rng.random() < 0.02:
                party = rng.choice(["aggregator", "keeper", *fleet.stage.devices])
                if party == "aggregator":
                    restart_aggregator(fleet)
                elif party == "keeper":
                    fleet.kill_keeper()
                    fleet.revive_keeper()
                elif party in fleet.devices:
                    restart_device(fleet, party)
        assert fleet.finished
        memory = KeeperMemory.load(fleet.stage.keeper_dir)
        places = [(one.run, one.round) for one in memory.opened]
        assert len(set(places)) == len(places)
        clusters, models = fleet.records()[-1]["clusters"], thetas(fleet)
        assert len({(clusters[name], models[name]) for name in clusters}) == len(set(clusters.values()))


def test_round_waits_for_the_keeper(tmp_path, stages):
    with fleet_of(tmp_path, stages) as fleet:
        fleet.kill_keeper()
        with pytest.raises(LoopbackError, match="waits for the keeper"):
            fleet.run(30)
        assert fleet.closed() == 0
        assert not fleet.service.state.waiting
        fleet.revive_keeper()
        fleet.run(120)
        assert fleet.finished


def test_device_is_off_once_acknowledged(tmp_path, stages, sums):
    """Half of the devices are switched off right after their acknowledgements: the sum has their updates."""
    with fleet_of(tmp_path, stages, quorum=0.5) as fleet:
        fleet.kill_keeper()
        with pytest.raises(LoopbackError, match="waits for the keeper"):
            fleet.run(30)
        for name in sorted(fleet.stage.devices)[:4]:
            fleet.kill_device(name)
        fleet.revive_keeper()
        fleet.run_until(lambda: fleet.closed() >= 2, 300)
        (made, opened), (first, second) = sums, fleet.records()[:2]
        assert opened[0][0] == first["contributed"] == 8
        assert (sum(made[at] for at in range(8)) == opened[0][1]).all()
        assert second["contributed"] <= 4


@pytest.mark.parametrize("restarted", [False, True])
def test_owner_stops_a_run_without_keeper(tmp_path, stages, restarted):
    """`run stop --now` needs no keeper: the open round changes nothing, and all end with the models of the one before."""
    with fleet_of(tmp_path, stages, rounds=20) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        fleet.kill_keeper()
        with pytest.raises(LoopbackError, match="keeper"):
            fleet.run(30)
        before = fleet.closed()
        assert fleet.ask(RequestAction.STOP, run=fleet.plan.run, now=True).answer is not None
        if restarted:
            restart_aggregator(fleet)
        fleet.run(200)
        *_, last, final = (r["round"] for r in fleet.records())
        assert before < last <= before + 2
        assert final == fleet.plan.recipe.rounds + 1
        assert len(set(thetas(fleet).values())) == 1


def test_crafted_means_are_refused(tmp_path, stages, monkeypatch, caplog):
    """An aggregator whose means are not those that were opened: no device takes a step, and each says why."""
    true = aggregator.rounds.held_models.summed_body

    def crafted(mean, sums, segment, run):
        body, vector = true(mean, sums, segment, run)
        words = np.frombuffer(body, "<u4", run.length).copy()
        words[3] += 1
        return words.tobytes() + body[words.nbytes :], vector

    with fleet_of(tmp_path, stages, rounds=4, deadline_s=5.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 60)
        monkeypatch.setattr(aggregator.rounds.held_models, "summed_body", crafted)
        fleet.run(200)
        # Every step is undone, and the run does not end with a mean that was made up.
        assert [r["contributed"] for r in fleet.records()] == [8, 8, 0, 8, 0]
        assert {fleet.model(name).round for name in fleet.stage.devices} == {2}
        told = [reason for reason in reasons(caplog) if "that is no sum of 8 updates of its devices" in reason]
        assert len(told) >= len(fleet.stage.devices)


def test_shared_segments(tmp_path, stages):
    """IFCA with a shared segment: its sums are over all cells, those of clusters over one."""
    bundle = logistic_bundle(INPUTS, CLASSES, segment="shared")
    options = {"algorithm": "ifca", "settings": {"k": 2}, "rounds": 6}
    with fleet_of(tmp_path, stages, groups=2, bundle=bundle, **options) as fleet:
        fleet.run(120)
        models = [theta[: 4 * INPUTS * CLASSES] for theta in thetas(fleet).values()]
        assert len(set(models)) == 1
        assert len(set(thetas(fleet).values())) == 2


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_statistics_are_summed(tmp_path, stages, precision):
    """Devices that standardise by the fleet's figures get these from sums."""
    features = DataDeclaration(
        features=tuple(f"f{i}" for i in range(INPUTS)),
        low=(-10,) * INPUTS,
        high=(10,) * INPUTS,
        standardise="federated",
    )
    bundle = logistic_bundle(INPUTS, CLASSES)
    bundle = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, data=features))
    with fleet_of(tmp_path, stages, bundle=bundle, algorithm="cfl", rounds=4, precision_up=precision) as fleet:
        fleet.run(120)
        assert fleet.finished
        assert len(set(thetas(fleet).values())) == 1
        assert fleet.records()[-1]["loss"] < fleet.records()[1]["loss"]
