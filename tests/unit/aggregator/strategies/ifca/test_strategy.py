"""IFCA against the paper's formulas on plain numpy: means, normalisations, restarts."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from shoal.protocol.documents import SegmentSpec
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = tuple(f"dev-{i}" for i in range(6))
CHOICE = {"dev-0": 0, "dev-1": 1, "dev-2": 1, "dev-3": 0, "dev-4": 1, "dev-5": 0}
RNG = np.random.default_rng(5)
VECTORS = {d: RNG.standard_normal(D).astype(np.float32) for d in DEVICES}
SAMPLES = {d: 10 * (i + 1) for i, d in enumerate(DEVICES)}


def answer(device, assignment, round_):
    model = assignment.candidates[CHOICE[device]]
    return contribution(device, VECTORS[device], round=round_, model=model, samples=SAMPLES[device])


def ifca(k=2, restarts=1, restart_rounds=10, rounds=100, **settings):
    changes = {key: settings.pop(key) for key in ("min_contributors", "local", "segments") if key in settings}
    if restarts > 1:
        settings |= {"restarts": restarts, "restart_rounds": restart_rounds}
    return Rounds(run_plan("ifca", {"k": k, **settings}, origins=k * restarts, rounds=rounds, **changes), DEVICES)


def expected(present, j, how):
    """Return what Alg. 1 line 14 or 16 adds to model j, in float64."""
    chosen = [d for d in present if CHOICE[d] == j]
    total = sum(VECTORS[d].astype(np.float64) for d in chosen)
    match how:
        case "cluster":
            return total / len(chosen)
        case "participants":
            return total / len(present)
        case "machines":
            return total / len(DEVICES)
        case "samples":
            weighted = sum(SAMPLES[d] * VECTORS[d].astype(np.float64) for d in chosen)
            return weighted / sum(SAMPLES[d] for d in chosen)


@pytest.mark.parametrize("how", ["cluster", "participants", "machines", "samples"])
@pytest.mark.parametrize("present", [DEVICES, ("dev-0", "dev-2", "dev-3", "dev-4")])
def test_each_model_moves_by_its_own_devices(how, present):
    rounds = ifca(normalise=how).after(answer, present=present)
    for j, slot in enumerate(rounds.state.slots):
        np.testing.assert_allclose(rounds.theta(slot), expected(present, j, how), rtol=1e-5)
        assert rounds.states[slot.origin].model == j


def test_an_empty_cluster_keeps_its_model():
    rounds = ifca().after(answer, present=("dev-0", "dev-3"))
    assert [slot.version for slot in rounds.state.slots] == [1, 0]


def test_last_choice_stands_while_away():
    """A devices last choice stands while it is away."""
    rounds = ifca()
    outcome = rounds.step(answer, present=("dev-0", "dev-1"))
    assert outcome.clusters == {**dict.fromkeys(DEVICES, 0), "dev-1": 1}
    outcome = rounds.step(answer, present=("dev-0", "dev-2"))
    assert outcome.clusters["dev-1"] == 1


def losing(losses):
    """Answers whose loss depends on the start they belong to."""

    def give(device, assignment, round_):
        start = assignment.candidates[0] // 2
        return contribution(
            device, VECTORS[device], round=round_, model=assignment.candidates[CHOICE[device]], loss=losses[start]
        )

    return give


@pytest.mark.parametrize("losses", [(0.5, 0.3, 0.9), (0.1, 0.3, 0.9), (0.9, 0.3, 0.2), (0.4, 0.4, 0.4)])
def test_the_start_of_least_loss_is_kept(losses):
    """Each start has its own origins and its own rounds; the first wins a tie."""
    rounds = ifca(restarts=3, restart_rounds=2)
    seen, choice = [], losing(losses)

    def spy(device, assignment, round_):
        seen.append((round_, assignment.candidates))
        return choice(device, assignment, round_)

    rounds.go(spy, 8)
    by_round = dict(seen)
    best = int(np.argmin(losses))
    kept = (2 * best, 2 * best + 1)
    assert [by_round[r] for r in range(1, 9)] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), kept, kept]
    assert [e.kind for e in rounds.events] == ["start-ended"] * 3 + ["start-kept"]
    assert rounds.events[-1].detail == {"start": best, "loss": losses[best]}
    assert rounds.events[0].detail["sizes"] == [3, 3]
    np.testing.assert_allclose(rounds.theta(rounds.state.slots[0]), 4 * expected(DEVICES, 0, "cluster"), rtol=1e-5)


def test_unanswered_start_is_never_best():
    """A start without an answer is never the best."""
    rounds = ifca(restarts=2, restart_rounds=1).after(lambda *_: None)
    rounds.step(losing((9.9, 9.9)))
    assert rounds.events[-1].detail["start"] == 1


def test_final_round_offers_the_kept_start():
    """The final round offers every model of the kept start."""
    rounds = ifca(restarts=2, restart_rounds=1).after(losing((0.5, 0.1)))
    rounds.step(losing((0.5, 0.1)))
    plan = rounds.strategy.final(rounds.state, 9, DEVICES)
    assert (set(plan.models), plan.assignments["dev-0"].candidates) == ({2, 3}, (2, 3))
    assert plan.final


@pytest.mark.parametrize("lie", [0.0, -3.4e38, 3.4e38])
def test_one_false_loss_chooses_no_start(lie):
    """It is told in favour of the worse start: of the first, or against the second."""
    rounds, answers = ifca(restarts=2, restart_rounds=1), losing((0.9, 0.3))

    def tell(device, assignment, round_):
        given = answers(device, assignment, round_)
        if device != DEVICES[0] or (round_ == 1) == (lie > 0):
            return given
        return dataclasses.replace(given, loss=lie)

    rounds.go(tell, 2)
    assert rounds.events[-1].detail["start"] == 1


def test_last_round_reports_own_clusters():
    """The outcome of that round has its choices, by the ids of its own models, though the start ends with it."""
    rounds = ifca(restarts=2, restart_rounds=1)
    for first in (0, 2):
        assert rounds.step(losing((0.5, 0.4))).clusters == {device: first + j for device, j in CHOICE.items()}


PARTS = (SegmentSpec("shared", 4), SegmentSpec("cluster", 2))


@pytest.mark.parametrize("how", ["cluster", "participants", "machines", "samples"])
@pytest.mark.parametrize("present", [DEVICES, ("dev-0", "dev-2", "dev-3", "dev-4")])
def test_all_participants_move_the_shared(how, present):
    """Section 4.3: the shared segment is averaged like the model of one cluster that holds all participants."""
    rounds = ifca(normalise=how, segments=PARTS).after(answer, present=present)
    weights = [SAMPLES[d] if how == "samples" else 1 for d in present]
    total = sum(w * VECTORS[d][:4].astype(np.float64) for w, d in zip(weights, present, strict=True))
    among = len(DEVICES) if how == "machines" else sum(weights)
    np.testing.assert_allclose(rounds.theta(rounds.state.shared, "shared"), total / among, rtol=1e-5)
    assert rounds.contributors(rounds.state.shared) == len(present)
    for j, slot in enumerate(rounds.state.slots):
        np.testing.assert_allclose(rounds.theta(slot, "cluster"), expected(present, j, how)[4:], rtol=1e-5)


def test_small_cluster_moves_shared_segment():
    """The shared mean has three contributors; model 0 has two, too few to move it."""
    rounds = ifca(min_contributors=3, segments=PARTS).after(answer, present=("dev-0", "dev-1"))
    assert rounds.state.shared == ClusterModel(), "two participants are too few"
    rounds.step(answer, present=("dev-0", "dev-1", "dev-3"))
    assert rounds.state.slots == (ClusterModel(0), ClusterModel(1))
    assert rounds.contributors(rounds.state.shared) == 3
    mean = np.mean([VECTORS[d][:4] for d in ("dev-0", "dev-1", "dev-3")], axis=0)
    np.testing.assert_allclose(rounds.theta(rounds.state.shared, "shared"), mean, rtol=1e-5)


def test_lone_device_weighs_at_most_the_cap():
    """Its own cluster has no median but its own weight."""
    rounds = ifca(normalise="samples", segments=PARTS)

    def lying(device, assignment, round_):
        alone = device == "dev-0"
        vector = np.full(D, -1.0 if alone else 1.0)
        return contribution(device, vector, round=round_, model=0 if alone else 1, samples=100_000 if alone else 10)

    outcome = rounds.step(lying)
    others = len(DEVICES) - 1
    shared = rounds.theta(rounds.state.shared, "shared")
    np.testing.assert_allclose(shared, (others - 3) / (others + 3), rtol=1e-5)
    np.testing.assert_allclose(rounds.theta(rounds.state.slots[0], "cluster"), -1.0)
    assert outcome.capped == {"dev-0": 30.0}


def test_plan_has_the_shared_segment_once():
    """Two small models and one shared; put together they are whole vectors in the order of the segments."""
    rounds = ifca(segments=PARTS[::-1]).after(answer)
    _, plan = rounds.strategy.plan(rounds.state, 2, DEVICES)
    parts = rounds.theta(plan.models[1], "cluster"), rounds.theta(plan.shared, "shared")
    assert [len(part) for part in parts] == [2, 4]
    np.testing.assert_array_equal(rounds.whole(plan, 1), np.concatenate(parts))
    assert rounds.strategy.final(rounds.state, 21, DEVICES).shared is rounds.state.shared


def test_only_the_shared_segment_moved():
    """A model that only the shared segment moved keeps its own."""
    rounds = ifca(segments=PARTS).after(answer, present=("dev-0", "dev-3"))
    _, plan = rounds.strategy.plan(rounds.state, 2, DEVICES)
    assert rounds.whole(plan, 1)[4:].tolist() == [0.0, 0.0]
    assert rounds.whole(plan, 1)[:4].any()
