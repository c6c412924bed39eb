"""FedGroup against Algs 2 and 3 and Eq. 9 on plain numpy, with updates whose groups are known."""

import numpy as np
import pytest

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


def answer(device, assignment, round_, scramble=slice(None)):
    phase = Phase(assignment.phase)
    vector = (PRE if phase is Phase.PRETRAIN else STEP)[device][scramble]
    return contribution(
        device, vector, round=round_, model=assignment.candidates[0], phase=phase, samples=SAMPLES[device]
    )


def fedgroup(**settings):
    changes = {k: settings.pop(k) for k in ("min_contributors", "participation", "rounds", "seed") if k in settings}
    return Rounds(run_plan("fedgroup", {"groups": 2, "alpha": 2, **settings}, **changes), DEVICES)


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
    pairs = {(TRUTH[d], g) for d, g in clusters.items()}
    return len(pairs) == len(set(clusters.values())) == 2


def mean(vectors, devices, weighted=True):
    weights = [SAMPLES[d] if weighted else 1 for d in devices]
    return np.average([vectors[d].astype(np.float64) for d in devices], 0, weights)


def members(state, j):
    return [d for d in DEVICES if state.clusters.get(d) == j]


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_the_group_cold_start_takes_alpha_m_devices_and_finds_the_groups(measure):
    """Alg. 3: their pre-training updates are clustered, a group's direction and model is their plain mean."""
    rounds, spy = fedgroup(measure=measure, alpha=3), Spy()
    outcome = rounds.step(spy)
    assert len(spy.asked[1]) == 6
    assert set(spy.asked[1].values()) == {(Phase.PRETRAIN, (3,))}
    assert set(outcome.clusters) == set(spy.asked[1])
    assert right(outcome.clusters)
    for j, slot in enumerate(rounds.state.slots):
        expected = mean(PRE, members(rounds.state, j), weighted=False)
        np.testing.assert_allclose(slot.offset, expected, rtol=1e-5)
        np.testing.assert_allclose(rounds.state.directions[j], expected, rtol=1e-5)


def test_cold_devices_are_drawn_by_the_seed():
    draws = set()
    for seed in range(5):
        spy = Spy()
        fedgroup(seed=seed).step(spy)
        draws.add(tuple(spy.asked[1]))
    assert len(draws) > 2


def test_newcomers_of_a_cohort_pretrain_before_the_whole_cohort_trains():
    """Eq. 9, then Alg. 2 lines 4 to 7: the round of training has the cohort that was drawn, and nobody else."""
    rounds, spy = fedgroup(participation=0.5), Spy()
    rounds.step(spy)
    known = set(rounds.state.clusters)
    rounds.step(spy)
    cohort = set(rounds.state.cohort)
    assert len(cohort) == 6
    assert set(spy.asked[2]) == cohort - known
    assert set(spy.asked[2].values()) == {(Phase.PRETRAIN, (3,))}
    before = [s.offset for s in rounds.state.slots]
    outcome = rounds.step(spy)
    assert {d: (Phase.TRAIN, (outcome.clusters[d],)) for d in cohort} == spy.asked[3]
    assert right(outcome.clusters)
    for j, slot in enumerate(rounds.state.slots):
        expected = mean(STEP, [d for d in sorted(cohort) if outcome.clusters[d] == j])
        np.testing.assert_allclose(slot.offset - before[j], expected, rtol=1e-4, atol=1e-5)
    assert rounds.state.cohort == ()


def test_a_cohort_without_newcomers_trains_at_once():
    rounds, spy = fedgroup(alpha=6), Spy()
    rounds.step(spy)
    rounds.step(spy)
    assert len(spy.asked[1]) == len(spy.asked[2]) == 12
    assert {phase for phase, _ in spy.asked[2].values()} == {Phase.TRAIN}


def test_a_newcomer_that_did_not_answer_is_cold_again_when_it_is_drawn_again():
    rounds, spy = fedgroup(), Spy()
    rounds.step(spy)
    late = next(d for d in DEVICES if d not in rounds.state.clusters)
    spy.absent = {late}
    outcome = rounds.step(spy)
    assert late not in outcome.clusters
    rounds.step(spy)
    assert late not in spy.asked[3]
    spy.absent = set()
    outcome = rounds.step(spy)
    assert set(spy.asked[4]) == {late}
    assert right(outcome.clusters)
    rounds.step(spy)
    assert len(spy.asked[5]) == 12


def test_a_waiting_cohort_that_has_gone_away_gives_way_to_a_new_one():
    rounds, spy = fedgroup(participation=0.25), Spy()
    rounds.step(spy)
    rounds.step(spy)
    gone = rounds.state.cohort
    assert gone
    here = tuple(d for d in DEVICES if d not in gone)
    _, plan = rounds.strategy.plan(rounds.state, 3, here)
    assert plan.assignments
    assert not set(plan.assignments) & set(gone)


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_a_mask_changes_no_group(measure):
    scramble = np.random.default_rng(1).permutation(D)
    clear, masked = fedgroup(measure=measure), fedgroup(measure=measure)
    for _ in range(4):
        ours = masked.step(lambda d, o, r: answer(d, o, r, scramble)).clusters
        assert clear.step(answer).clusters == ours
    for a, b in zip(clear.state.slots, masked.state.slots, strict=True):
        assert a.offset[scramble].tobytes() == b.offset.tobytes()


def test_groups_can_start_at_the_origin():
    """Alg. 2 line 2; the directions that newcomers are compared with stay."""
    rounds = fedgroup(start="origin")
    outcome = rounds.step(answer)
    assert all(s.offset is None for s in rounds.state.slots)
    assert right(rounds.step(answer).clusters)
    assert len(outcome.clusters) == 4


def test_rcc_takes_single_devices_as_directions():
    rounds = fedgroup(rcc="on", alpha=3, seed=3)
    outcome = rounds.step(answer)
    for j, direction in enumerate(rounds.state.directions):
        assert any(direction.tobytes() == PRE[d].tobytes() for d in members(rounds.state, j))
    assert len(outcome.clusters) == 6


def test_rac_sends_newcomers_to_a_group_without_pretraining():
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
    assert outcome.clusters == {}
    assert outcome.events[0].kind == "cold-start-postponed"
    assert right(rounds.step(answer).clusters)


def test_an_empty_group_keeps_its_model():
    rounds = fedgroup(alpha=6)
    rounds.step(answer)
    kept = rounds.state.slots
    only = tuple(members(rounds.state, 1))
    rounds.step(answer, present=only)
    assert rounds.state.slots[0] is kept[0]
    assert rounds.state.slots[1].version == 2


def test_a_group_of_too_few_starts_at_the_origin_and_is_not_moved():
    rounds = fedgroup(alpha=6, min_contributors=7)
    rounds.step(answer)
    rounds.step(answer)
    assert all(s.offset is None for s in rounds.state.slots)
    assert right(rounds.state.clusters)


def test_whoever_met_no_group_ends_with_the_mean_of_the_groups():
    rounds = fedgroup(alpha=3)
    rounds.step(answer)
    plan = rounds.strategy.final(rounds.state, 21, DEVICES)
    cold = [d for d in DEVICES if d not in rounds.state.clusters]
    assert {plan.assignments[d].candidates for d in cold} == {(2,)}
    both = [s.offset for s in rounds.state.slots]
    np.testing.assert_allclose(plan.models[2].offset, (both[0] + both[1]) / 2, rtol=1e-6)
    assert plan.models[2].contributors == min(s.contributors for s in rounds.state.slots)


def test_a_run_that_never_started_ends_at_the_origin():
    rounds = fedgroup()
    plan = rounds.strategy.final(rounds.state, 21, DEVICES)
    assert {o.candidates for o in plan.assignments.values()} == {(2,)}
    assert plan.models[2].offset is None


def test_dump_and_load_give_the_same_state_at_every_step():
    """Also between a newcomers' round and the round that waits for it."""
    plain, kept = fedgroup(participation=0.5), fedgroup(participation=0.5)
    for _ in range(5):
        kept.reload()
        assert plain.step(answer) == kept.step(answer)
        encoded = kept.reload()
        assert kept.state.cohort == plain.state.cohort
        assert len(encoded.arrays) == 4
        for a, b in zip(plain.state.slots, kept.state.slots, strict=True):
            assert (a.offset.tobytes(), a.contributors, a.version) == (b.offset.tobytes(), b.contributors, b.version)


def test_the_discrepancy_is_told_in_every_round_of_training():
    rounds = fedgroup(alpha=6)
    rounds.step(answer)
    outcome = rounds.step(answer)
    (event,) = [e for e in outcome.events if e.kind == "discrepancy"]
    norms = [np.linalg.norm(STEP[d]) for d in DEVICES]
    apart = [np.linalg.norm(STEP[d] - mean(STEP, members(rounds.state, outcome.clusters[d]))) for d in DEVICES]
    assert event.detail["mean"] == pytest.approx(np.mean(norms))
    assert event.detail["variance"] == pytest.approx(np.var(norms))
    assert event.detail["mean_after"] == pytest.approx(np.mean(apart), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"groups": 0}}, "groups is from 1"),
        ({"settings": {"alpha": 0}}, "alpha is at least 1"),
        ({"settings": {"measure": "l2"}}, "neither edc nor madc"),
        ({"settings": {"start": "zero"}}, "neither mean nor origin"),
        ({"rounds": 1}, "round of its own"),
        ({"origins": 2}, "one origin"),
        ({"segments": (SegmentSpec("shared", 2), SegmentSpec("cluster", 4))}, "no shared segment"),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        Rounds(run_plan("fedgroup", **changes), DEVICES)


@pytest.mark.parametrize(("eta_g", "keys"), [(0.1, "round"), (0.0, "round"), (0.1, "run")])
def test_under_round_keys_checkpoints_of_all_groups_are_ordered_where_their_models_are_added_up(eta_g, keys):
    """A device of one group needs the others' models to make its own."""
    devices = tuple(f"dev-{i}" for i in range(6))
    settings = {"groups": 2, "alpha": 3, "eta_g": eta_g, "discrepancy": False}
    rounds = Rounds(run_plan("fedgroup", settings, keys=keys), devices)

    def answer(device, order, round_):
        values = np.full(6, 1.0 if device < "dev-3" else -1.0)
        return contribution(device, values, round=round_, model=order.candidates[0], phase=order.phase, model_norm=1.0)

    rounds.step(answer)
    group = [d for d, j in rounds.state.clusters.items() if j == 0]
    _, plan = rounds.strategy.plan(rounds.state, 2, tuple(group))
    seals = eta_g > 0 and keys == "round"
    assert plan.seal == (frozenset({0, 1}) if seals else frozenset())
    assert set(plan.models) == ({0, 1} if seals else {0})
