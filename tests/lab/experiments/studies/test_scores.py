"""The devices that a round tests, and the best round."""

import dataclasses
from types import SimpleNamespace

import pytest
from shoal_lab.experiments.studies import watch as module
from shoal_lab.experiments.studies.watch import Scores, decided

from aggregator.strategies.base import ClusterModel, Event, Outcome, RoundPlan, final_assignment
from shoal.protocol.messages import Phase
from shoal.simulation.engine.simulate import Observation
from tests.helpers.plans import contribution
from tests.helpers.studies import run


def test_a_decided_device_keeps_its_model():
    """IFCA's devices would choose again; one with a single candidate has no cluster to look up."""
    models = {3: ClusterModel(), 8: ClusterModel()}
    many = final_assignment((3, 8))
    final = RoundPlan(5, models, {"a": many, "b": many, "c": final_assignment((3,))}, final=True)
    found = decided(final, {"a": 1, "b": 0})
    assert {d: o.candidates for d, o in found.assignments.items()} == {"a": (8,), "b": (3,), "c": (3,)}
    assert found.assignments["a"].evaluate
    assert (found.models, found.round, found.final) == (models, 5, True)
    assert final.assignments["a"].candidates == (3, 8)


class FinalRounds:
    """A strategy that remembers the devices of its final rounds."""

    def __init__(self):
        self.asked = []

    def final(self, _state, round_, devices):
        self.asked.append((round_, devices))
        return RoundPlan(round_, {}, {}, final=True)


@pytest.fixture
def final_rounds(monkeypatch):
    """Return a made-up strategy; a test of its final round finds an accuracy of ten times the number of devices."""
    strategy = FinalRounds()
    monkeypatch.setattr(module, "make_strategy", lambda *_: strategy)

    def evaluate(_workforce, _final, protocol):
        names = strategy.asked[-1][1]
        return SimpleNamespace(accuracy=10.0 * len(names), names=names) if protocol == "assigned" else None

    monkeypatch.setattr(module, "evaluate", evaluate)
    return strategy


def observed(round_, *devices, events=(), norms=None):
    given = [
        dataclasses.replace(contribution(d), norm=n, phase=p)
        for d, n, p in zip(devices, norms or [1.0] * len(devices), [Phase.TRAIN] * len(devices), strict=True)
    ]
    force = SimpleNamespace(population=SimpleNamespace(names=("a", "b", "c")), run=None, average=None)
    return Observation(
        round=round_,
        plan=RoundPlan(round_ + 1, {}, {}),
        contributions=tuple(given),
        outcome=Outcome({}, tuple(events)),
        state=None,
        workforce=force,
    )


def test_devices_that_were_met_are_tested(final_rounds):
    """Also those of rounds that don't count, and in the order of their names."""
    scores = Scores(everybody=False, every=1, rounds=9)
    scores(observed(0, "c"))
    assert scores.rows == {}
    scores(observed(1, "b"))
    scores(observed(2, "b"))
    scores(observed(3, "a"))
    assert [devices for _, devices in final_rounds.asked] == [("b", "c"), ("b", "c"), ("a", "b", "c")]
    assert [(r["accuracy"], r["tested"]) for r in scores.rows.values()] == [(20.0, 2), (20.0, 2), (30.0, 3)]


def test_baselines_are_tested_on_everybody(final_rounds):
    """The cold start of any round is kept."""
    scores = Scores(everybody=True, every=1, rounds=9)
    scores(observed(0, events=[Event(1, "cold-start", {"groups": 3})]))
    scores(observed(1, "b"))
    assert final_rounds.asked == [(3, ("a", "b", "c"))]
    assert scores.cold_start == {"groups": 3}


def test_the_last_round_is_always_tested(final_rounds):
    scores = Scores(everybody=True, every=2, rounds=5)
    for round_ in range(1, 6):
        scores(observed(round_, "a"))
    assert [r for r, row in scores.rows.items() if "accuracy" in row] == [2, 4, 5]


def test_discrepancies_are_means_in_training(final_rounds):
    scores = Scores(everybody=True, every=1, rounds=9)
    seen = observed(1, "a", "b", "c", norms=[1.0, 4.0, 100.0], events=[Event(1, "discrepancy", {"mean_after": 0.5})])
    third = dataclasses.replace(seen.contributions[2], phase=Phase.PRETRAIN)
    scores(dataclasses.replace(seen, contributions=(*seen.contributions[:2], third)))
    scores(observed(2, events=[Event(2, "discrepancy", {"mean": 3.0})]))
    assert (scores.rows[1]["discrepancy"], scores.rows[1]["discrepancy_after"]) == (2.5, 0.5)
    assert not {"discrepancy", "discrepancy_after"} & scores.rows[2].keys()


def test_the_best_of_most_tested_skips_few():
    """95 of 100 suffice, 94 do not."""
    rows = [{"accuracy": a, "tested": n} for a, n in ((99.0, 10), (98.0, 94), (80.0, 95), (70.0, 100))]
    assert module.best_of_most(rows) == 80.0


@pytest.mark.parametrize("every", ["1", "2"])
def test_the_result_is_the_best_round(every):
    settings = {"epochs": 1, "trainer": "loop", "evaluate_every": every, "cohort": 4}
    found = run("fedgroup-synthetic", algorithm="fedavg", devices=4, rounds=3, settings=settings)
    tested = [row for row in found["history"] if row["accuracy"] is not None]
    assert [row["round"] for row in tested] == ([1, 2, 3] if every == "1" else [2, 3])
    assert found["accuracy"] == max(row["accuracy"] for row in tested)
    assert found["best_round"] == next(row["round"] for row in tested if row["accuracy"] == found["accuracy"])
    assert (found["accuracy_last"], found["last_tested"]) == (tested[-1]["accuracy"], 4)
    assert (found["population"]["devices"], found["sizes"]) == (4, [4])
    assert "cold_start" not in found


def test_the_cold_start_takes_everybody():
    settings = {"epochs": 1, "cohort": 6, "pretrain_steps": 5}
    data = run("fedgroup-synthetic", devices=12, rounds=3, seed=7, settings=settings)
    assert data["cold_start"]["devices"] == 12
    assert [row["tested"] for row in data["history"]] == [12, 12, 12]
