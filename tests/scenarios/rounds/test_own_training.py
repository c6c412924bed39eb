"""Fleets whose devices train with code of their own, and one whose code fails."""

import numpy as np
import pytest

from edge_client.answers.inference import choose
from edge_client.learning.trainer.model import make_model
from shoal.protocol.recipe import LocalTraining
from tests.helpers import own_trainers
from tests.helpers.fleets import (
    finish_of,
    grouped_data,
    make_fleet,
    names,
    restart_device,
    same_partition,
    truth_of,
)
from tests.helpers.own_trainers import bundle, command
from tests.helpers.tasks import CLASSES, INPUTS

COUNT = 3
ODD = "dev-01"
DEADLINE_S = 60.0
STEPS = LocalTraining(epochs=4, lr=0.8)


def fleet_of(place, odd=own_trainers.Softmax, count=COUNT, groups=1, limits=None, **options):
    """Return a fleet whose devices train with `Softmax`, and ODD with another class; None leaves it without."""
    data = grouped_data(count, groups, inputs=INPUTS, classes=CLASSES)
    trainers = {name: {"trainer": command().spec} for name in names(count)}
    trainers[ODD] = {} if odd is None else {"trainer": command(odd).spec, **(limits or {})}
    return make_fleet(place, data, bundle=bundle(), trainers=trainers, **({"local": STEPS, "quorum": 0.5} | options))


def rounds_of(private):
    return float(private[-1])


def test_the_fleet_learns_and_keeps_its_own(tmp_path):
    """All models are alike but for the private count; evaluation, the finish and answers work."""
    with fleet_of(tmp_path / "fleet", evaluate_every=1) as fleet:
        records = fleet.run(10)
        assert all((r["contributed"], r["declined"]) == (COUNT, {}) for r in records)
        assert records[2]["loss"] < records[0]["loss"]
        assert all(0 < r["correct"] <= r["tested"] for r in records)
        found = [fleet.model(name).theta for name in names(COUNT)]
        assert [rounds_of(theta) for theta in found] == [3, 3, 3]
        assert len({theta[:-1].tobytes() for theta in found}) == 1
        assert finish_of(fleet, ODD)
        place = fleet.stage.device_dir(ODD)
        chosen = choose(place, backend=make_model("numpy", command()))
        x = grouped_data(COUNT, inputs=INPUTS, classes=CLASSES)[ODD].x
        expected = own_trainers.Softmax().predict(chosen.at(None).theta, x)
        np.testing.assert_allclose(chosen.outputs(x), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("odd", "limits", "reason", "words"),
    [
        (own_trainers.Exits, {}, "trainer", "ended with status 3"),
        (own_trainers.Hangs, {"trainer_s": 0.5}, "trainer", "has not answered for 0.5 seconds"),
        (own_trainers.Eats, {}, "trainer", "MemoryError"),
        (own_trainers.NotFinite, {}, "task", "numbers that are not finite"),
        (None, {}, "trainer", "needs the trainer softmax 1, and this device has none"),
        pytest.param(own_trainers.Newer, {}, "trainer", "this device has softmax 2", marks=pytest.mark.long),
    ],
)
def test_a_failure_costs_its_device_alone(tmp_path, odd, limits, reason, words, caplog):
    with fleet_of(tmp_path / "fleet", odd, limits=limits, deadline_s=DEADLINE_S, rounds=2) as fleet:
        records = fleet.run(DEADLINE_S)
        assert fleet.now_s < DEADLINE_S / 2, "no round waits for it"
        rounds = [r for r in records if not r["final"]]
        assert [(r["contributed"], r["declined"]) for r in rounds] == [(COUNT - 1, {ODD: reason})] * 2
    assert any(words in str(r.kv["reason"]) for r in caplog.records if r.name == "shoal.edge" and "reason" in r.kv)


def test_a_killed_device_keeps_its_state(tmp_path):
    """It has trained each round once, whenever it was killed."""
    with fleet_of(tmp_path / "fleet", rounds=5, quorum=1.0) as fleet:
        for killed in range(1, 4):
            fleet.run_until(lambda killed=killed: fleet.closed() >= killed, DEADLINE_S)
            restart_device(fleet, ODD)
        fleet.run(DEADLINE_S)
        assert rounds_of(fleet.model(ODD).theta) == 5


@pytest.mark.parametrize("algorithm", ["ifca", pytest.param("cfl", marks=pytest.mark.long)])
def test_groups_are_found(tmp_path, algorithm):
    settings = {"settings": {"k": "2", "restarts": "3", "restart_rounds": "2"}} if algorithm == "ifca" else {}
    with fleet_of(
        tmp_path / "fleet", count=4, groups=2, algorithm=algorithm, rounds=8 if settings else 30, **settings
    ) as fleet:
        records = fleet.run(100)
        assert same_partition(records[-1]["clusters"], truth_of(4, 2))
