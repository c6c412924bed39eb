"""FedGroup against Algs 2 and 3 on plain numpy, with updates whose groups are known."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from aggregator.strategies.drawing import drawn
from aggregator.strategies.fedgroup.strategy import nearest_directions, random_centres
from edge_client.learning.scoring import nearest_direction
from shoal.errors import ConfigError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = tuple(f"dev-{i:02d}" for i in range(12))
TRUTH = {d: i % 2 for i, d in enumerate(DEVICES)}
RNG = np.random.default_rng(8)
GOALS = RNG.standard_normal((2, D)) * 5
PRE = {d: (GOALS[g] + 0.3 * RNG.standard_normal(D)).astype(np.float32) for d, g in TRUTH.items()}
STEP = {d: RNG.standard_normal(D).astype(np.float32) for d in DEVICES}
SAMPLES = {d: 10 * (i + 1) for i, d in enumerate(DEVICES)}


def answer(device, assignment, round_):
    phase = Phase(assignment.phase)
    vector = (PRE if phase is Phase.PRETRAIN else STEP)[device]
    return contribution(
        device, vector, round=round_, model=assignment.candidates[0], phase=phase, samples=SAMPLES[device]
    )


def fedgroup(**settings):
    changes = {k: settings.pop(k) for k in ("min_contributors", "participation", "rounds", "seed") if k in settings}
    return Rounds(run_plan("fedgroup", {"groups": 2, "alpha": 2, **settings}, **changes), DEVICES)


def placing(rounds, give=answer):
    """Return answers in which newcomers compare their update with the models that they are asked to compare with."""

    def placed(device, assignment, round_):
        if assignment.phase != Phase.PLACE:
            return give(device, assignment, round_)
        (start,) = assignment.candidates
        models = {m: rounds.theta(rounds.plan.models[m]) for m in assignment.models}
        nearest = nearest_direction(start, PRE[device], assignment.compare, models)
        given = give(device, assignment, round_)
        return None if given is None else dataclasses.replace(given, vector=None, norm=0.0, nearest=nearest)

    return placed


class Spy:
    """Answers, and remembers what was asked."""

    def __init__(self, absent=()):
        self.asked = {}
        self.absent = set(absent)

    def __call__(self, device, assignment, round_):
        self.asked.setdefault(round_, {})[device] = (Phase(assignment.phase), assignment.candidates)
        return None if device in self.absent else answer(device, assignment, round_)


def right(clusters):
    """Whether the devices that have a group are parted as they should be."""
    return len({(TRUTH[d], g) for d, g in clusters.items()}) == len(set(clusters.values())) == 2


def mean(vectors, devices, weighted=True):
    weights = [SAMPLES[d] if weighted else 1 for d in devices]
    return np.average([vectors[d].astype(np.float64) for d in devices], 0, weights)


def members(state, j):
    return [d for d in DEVICES if state.clusters.get(d) == j]


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_cold_start_finds_the_groups(measure):
    """Alg. 3: their pre-training updates are clustered, and a group's model is their plain mean."""
    rounds, spy = fedgroup(measure=measure, alpha=3), Spy()
    outcome = rounds.step(spy)
    assert (len(spy.asked[1]), set(spy.asked[1].values())) == (6, {(Phase.PRETRAIN, (3,))})
    assert set(outcome.clusters) == set(spy.asked[1])
    assert right(outcome.clusters)
    for j, slot in enumerate(rounds.state.slots):
        expected = mean(PRE, members(rounds.state, j), weighted=False)
        np.testing.assert_allclose(rounds.theta(slot), expected, rtol=1e-5)
        direction = rounds.theta(rounds.state.directions[j]) - rounds.theta(rounds.state.origin)
        np.testing.assert_allclose(direction, expected, rtol=1e-5)
    kept = rounds.state.directions
    rounds.go(placing(rounds), 3)
    assert rounds.state.directions == kept, "groups have moved, their directions have not"


def test_cold_devices_are_drawn_by_the_seed():
    draws = set()
    for seed in range(5):
        spy = Spy()
        fedgroup(seed=seed).step(spy)
        draws.add(tuple(spy.asked[1]))
    assert len(draws) > 2


def choosing(rounds, spy):
    """Return answers of devices that take the group of least loss, which is that of the devices of their truth."""

    def give(device, assignment, round_):
        given = spy(device, assignment, round_)
        if given is None or len(assignment.candidates) == 1:
            return given
        (model,) = {g for d, g in rounds.state.clusters.items() if TRUTH[d] == TRUTH[device]}
        return dataclasses.replace(given, model=model)

    return give


@pytest.mark.parametrize("start", ["mean", "origin"])
def test_newcomers_are_placed_then_train(start):
    """Eq. 9 and Alg. 2 lines 4 to 7: the round of training has the cohort that was drawn before the placement."""
    rounds, spy = fedgroup(participation=0.5, start=start), Spy()
    rounds.step(spy)
    known = dict(rounds.state.clusters)
    assert (rounds.state.slots == (ClusterModel(), ClusterModel())) is (start == "origin"), "Alg. 2 line 2"
    before = [rounds.theta(s) for s in rounds.state.slots]
    cohort = set(drawn(rounds.strategy.run, 2, DEVICES))
    assert len(cohort) == 6
    outcome = rounds.step(placing(rounds, spy))
    assert cohort - known.keys()
    assert spy.asked[2] == dict.fromkeys(sorted(cohort - known.keys()), (Phase.PLACE, (3,)))
    assert {o.compare for o in rounds.plan.assignments.values()} == {(4, 5)}
    assert right(outcome.clusters)
    late = {d: outcome.clusters[d] for d in sorted(cohort - known.keys())}
    assert [e.detail for e in outcome.events if e.kind == "newcomers"] == [{"groups": late, "by": "direction"}]
    assert [rounds.theta(s).tolist() for s in rounds.state.slots] == [b.tolist() for b in before]
    outcome = rounds.step(placing(rounds, spy))
    assert spy.asked[3] == {d: (Phase.TRAIN, (outcome.clusters[d],)) for d in cohort}
    for j, slot in enumerate(rounds.state.slots):
        moved = mean(STEP, [d for d in sorted(cohort) if outcome.clusters[d] == j])
        np.testing.assert_allclose(rounds.theta(slot) - before[j], moved, rtol=1e-4, atol=1e-5)


def test_silent_newcomer_chooses_by_loss():
    """A newcomer that did not answer is asked for a direction once, and then chooses by loss."""
    rounds, spy = fedgroup(), Spy()
    rounds.step(spy)
    late = next(d for d in DEVICES if d not in rounds.state.clusters)
    spy.absent = {late}
    outcome = rounds.step(placing(rounds, spy))
    assert late not in outcome.clusters
    give = choosing(rounds, placing(rounds, spy))
    rounds.go(give, 3)
    assert [Phase.PLACE in {phase for phase, _ in spy.asked[r].values()} for r in range(2, 6)] == [True, *[False] * 3]
    spy.absent = set()
    outcome = rounds.step(give)
    assert {d for d, (_, candidates) in spy.asked[6].items() if len(candidates) > 1} == {late}
    assert [e.detail for e in outcome.events if e.kind == "newcomers"] == [
        {"groups": {late: outcome.clusters[late]}, "by": "loss"}
    ]
    assert right(outcome.clusters)


def test_other_plan_chooses_by_loss():
    """The other plan of a placement lets the cohort train and newcomers choose by loss."""
    rounds = fedgroup(participation=0.5).after(answer)
    known = rounds.state.clusters
    _, plan = rounds.strategy.plan(rounds.state, 2, DEVICES)
    state, other = plan.otherwise
    assert set(other.assignments) == set(drawn(rounds.strategy.run, 2, DEVICES))
    assert {d: o.candidates for d, o in other.assignments.items()} == {
        d: (known[d],) if d in known else (0, 1) for d in other.assignments
    }
    assert state.cohort == ()


def test_missing_direction_chooses_by_loss():
    """A mean of fewer devices than the plan wants would show what single devices sent."""
    rounds, spy = fedgroup(alpha=1, min_contributors=3), Spy()
    rounds.step(spy)
    assert rounds.state.directions == ()
    rounds.step(spy)
    assert {phase for phase, _ in spy.asked[2].values()} == {Phase.TRAIN}


def test_small_group_joins_the_nearest():
    """It would keep its first model for good."""
    alone = DEVICES[0]
    apart = {**PRE, alone: (PRE[alone] + 40).astype(np.float32)}

    def give(device, assignment, round_):
        vector = apart[device] if assignment.phase == Phase.PRETRAIN else STEP[device]
        return dataclasses.replace(answer(device, assignment, round_), vector=vector)

    for least, sizes in ((1, [1, 5, 6]), (3, [5, 7])):
        rounds = fedgroup(groups=3, alpha=4, min_contributors=least)
        assert sorted(Counter(rounds.step(give).clusters.values()).values()) == sizes
        assert all(rounds.contributors(slot) >= least for slot in rounds.state.slots)


def test_no_groups_end_with_one_model():
    """While no groups are found all end with the one model."""
    rounds = Rounds(run_plan("fedgroup", {}), DEVICES).after(
        lambda d, o, r: dataclasses.replace(answer(d, o, r), vector=STEP[DEVICES[0]])
    )
    plan = rounds.strategy.final(rounds.state, 2, DEVICES)
    (model,) = plan.models
    assert {o.candidates for o in plan.assignments.values()} == {(model,)}
    np.testing.assert_allclose(rounds.theta(plan.models[model]), STEP[DEVICES[0]], rtol=1e-5)
    assert rounds.events[0].kind == "one-group"


def test_rcc_groups_by_the_nearest_drawn():
    """Rcc groups devices by the nearest of those drawn."""
    rounds = fedgroup(rcc="on", alpha=3, seed=3)
    outcome = rounds.step(answer)
    asked = sorted(outcome.clusters)
    rows = [PRE[d] for d in asked]
    centres = [rows[i] for i in random_centres(rows, 2, 3)]
    assert [outcome.clusters[d] for d in asked] == nearest_directions(rows, centres)
    assert len(outcome.clusters) == 6
    for model, i in zip(rounds.state.directions, random_centres(rows, 2, 3), strict=True):
        np.testing.assert_allclose(rounds.theta(model), rows[i], rtol=1e-5)
    rounds = fedgroup(rcc="on", alpha=6, min_contributors=2).after(answer)
    assert rounds.state.directions == (), "a mean needs two devices"


def test_rac_places_at_random():
    """Rac sends newcomers to a group without pretraining."""
    rounds, spy = fedgroup(rac="on"), Spy()
    cold = rounds.step(spy).clusters
    outcome = rounds.step(spy)
    assert len(spy.asked[2]) == 12
    assert {phase for phase, _ in spy.asked[2].values()} == {Phase.TRAIN}
    assert {d: outcome.clusters[d] for d in cold} == cold
    assert set(outcome.clusters) == set(DEVICES)
    assert not right(outcome.clusters)


def test_too_few_cold_devices_start_nothing():
    rounds = fedgroup()
    first = min(rounds.strategy.plan(rounds.state, 1, DEVICES)[1].assignments)
    outcome = rounds.step(lambda d, o, r: answer(d, o, r) if d == first else None)
    assert (outcome.clusters, outcome.events[0].kind) == ({}, "cold-start-postponed")
    assert right(rounds.step(answer).clusters)


def test_too_few_start_at_the_origin():
    """Together they are too few as well, so no group could take them in."""
    rounds = fedgroup(alpha=6, min_contributors=13).after(answer)
    rounds.step(answer)
    assert rounds.state.slots == (ClusterModel(),)


def test_unmet_devices_get_the_mean():
    """Whoever met no group ends with the mean of the groups."""
    rounds = fedgroup(alpha=3)
    plan = rounds.strategy.final(rounds.state, 21, DEVICES)
    assert {o.candidates for o in plan.assignments.values()} == {(2,)}
    assert plan.models[2] == ClusterModel(), "a run that never started ends at the origin"
    rounds.step(answer)
    plan = rounds.strategy.final(rounds.state, 21, DEVICES)
    cold = [d for d in DEVICES if d not in rounds.state.clusters]
    assert {plan.assignments[d].candidates for d in cold} == {(2,)}
    both = [rounds.theta(s) for s in rounds.state.slots]
    np.testing.assert_allclose(rounds.theta(plan.models[2]), (both[0] + both[1]) / 2, rtol=1e-6)


def test_discrepancy_is_told_every_round():
    """The discrepancy is told in every round of training."""
    rounds, spy = fedgroup(alpha=6), Spy()
    outcome = rounds.go(spy, 2)
    assert [len(asked) for asked in spy.asked.values()] == [12, 12]
    assert {phase for phase, _ in spy.asked[2].values()} == {Phase.TRAIN}, "a cohort without newcomers trains at once"
    (event,) = [e for e in outcome.events if e.kind == "discrepancy"]
    norms = [np.linalg.norm(STEP[d]) for d in DEVICES]
    apart = [np.linalg.norm(STEP[d] - mean(STEP, members(rounds.state, outcome.clusters[d]))) for d in DEVICES]
    assert event.detail["mean"] == pytest.approx(np.mean(norms))
    assert event.detail["variance"] == pytest.approx(np.var(norms))
    assert event.detail["mean_after"] == pytest.approx(np.mean(apart), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"groups": 0}}, "groups is at least 1, or auto"),
        ({"settings": {"groups": 10**6}}, "groups is from 1 to"),
        ({"settings": {"alpha": 0}}, "alpha is at least 1"),
        ({"settings": {"measure": "l2"}}, "neither edc nor madc"),
        ({"settings": {"eta_g": -0.1}}, "eta_g"),
        ({"settings": {"rcc": "on"}}, "rcc draws a given number"),
        ({"settings": {"start": "zero"}}, "neither mean nor origin"),
        ({"rounds": 1}, "round of its own"),
        ({"origins": 2, "settings": {"groups": 3}}, "fedgroup begins with 1 models, and the run has 2"),
        ({"segments": (SegmentSpec("shared", 2), SegmentSpec("cluster", 4))}, "no shared segment"),
    ],
)
def test_senseless_plans_are_refused(changes, reason):
    """Plans that make no sense are refused."""
    with pytest.raises(ConfigError, match=reason):
        Rounds(run_plan("fedgroup", **changes), DEVICES)


@pytest.mark.parametrize("eta_g", [0.1, 0.0])
def test_added_models_order_all_checkpoints(eta_g):
    """A device of one group needs the others' models to make its own."""
    devices = tuple(f"dev-{i}" for i in range(6))
    rounds = Rounds(run_plan("fedgroup", {"groups": 2, "alpha": 3, "eta_g": eta_g, "discrepancy": False}), devices)

    def answer(device, order, round_):
        values = np.full(6, 1.0 if device < "dev-3" else -1.0)
        return contribution(device, values, round=round_, model=order.candidates[0], phase=order.phase, model_norm=1.0)

    rounds.step(answer)
    group = [d for d, j in rounds.state.clusters.items() if j == 0]
    _, plan = rounds.strategy.plan(rounds.state, 2, tuple(group))
    assert plan.seal == (frozenset({0, 1}) if eta_g else frozenset())
    assert set(plan.models) == ({0, 1} if eta_g else {0})
