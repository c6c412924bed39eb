"""Clusters whose model stands still: when they are reported, with which reason, and when the report ends."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rounds.standstill import (
    LEFT_EMPTY,
    MOVES_AGAIN,
    NAMES_SHOWN,
    ROUNDS_STILL,
    STANDS_STILL,
    RoundFacts,
    Standstill,
    named,
    observe,
)
from aggregator.strategies.base import ClusterModel, RoundPlan, train_assignment
from shoal.protocol.messages import Phase
from shoal.util.state_codec import decode_state, encode_state

FIVE = tuple(f"dev-{i}" for i in range(5))
TRAIN = train_assignment((0,), evaluate=False)


def facts(round_, members=FIVE, *, version=0, cluster=0, asked=None, **changes):
    """Return a round of one cluster in which all its devices train, unless ``changes`` say otherwise."""
    asked = members if asked is None else asked
    assignments = asked if isinstance(asked, dict) else dict.fromkeys(asked, TRAIN)
    models = {cluster: ClusterModel(version=version)}
    chosen = {"there": members, "used": tuple(assignments), **changes}
    return RoundFacts(
        plan=RoundPlan(round_, models, assignments), clusters=dict.fromkeys(members, cluster), models=models, **chosen
    )


def run(rounds, least=3, participation=1.0, before=None):
    """Return the last standstill, and all events."""
    state, told = before or Standstill(), []
    for seen in rounds:
        state, events = observe(state, seen, least=least, participation=participation)
        told += events
    return state, told


def test_end_is_reported_once():
    """The end is reported once and a second standstill again."""
    rounds = [facts(r, FIVE[:2]) for r in range(1, 6)]
    rounds += [facts(r, FIVE, version=r) for r in range(6, 9)]
    rounds += [facts(r, FIVE[:2], version=8) for r in range(9, 13)]
    state, events = run(rounds[:5])
    assert [(e.round, e.kind, e.detail["cluster"], e.detail["rounds"]) for e in events] == [(3, STANDS_STILL, 0, 3)]
    assert [(still.cluster, still.devices, still.rounds) for still in state.now] == [(0, 2, 5)], "shown while it lasts"
    state, events = run(rounds)
    assert [(e.round, e.kind) for e in events] == [(3, STANDS_STILL), (6, MOVES_AGAIN), (11, STANDS_STILL)]
    assert events[1].detail == {"cluster": 0, "rounds": 5}
    assert state.told == (0,)


def test_deserted_cluster_is_reported():
    """A cluster that nobody is in any more is reported as that."""
    rounds = [facts(r, FIVE[:2]) for r in range(1, 5)]
    rounds += [facts(r, FIVE, cluster=7, version=r) for r in range(5, 8)]
    state, events = run(rounds)
    assert [(e.round, e.kind, e.detail["cluster"]) for e in events] == [(3, STANDS_STILL, 0), (5, LEFT_EMPTY, 0)]
    assert (state.now, state.told) == ((), ())


def reason_of(**changes):
    """Return reason and hint after three equal rounds."""
    more = {name: changes.pop(name) for name in ("least", "participation") if name in changes}
    state, _ = run((facts(round_, **changes) for round_ in range(1, 4)), **more)
    (still,) = state.now
    return still.reason, still.hint


OTHER = {"other": TRAIN}


@pytest.mark.parametrize(
    ("changes", "reason", "hints"),
    [
        (
            {"members": FIVE[:2]},
            "it has 2 devices, and a mean takes 3",
            ["--min-contributors of 2", "more devices like these"],
        ),
        (
            {"there": FIVE[:2], "asked": FIVE[:2]},
            "2 of its 5 devices are online, and a mean takes 3",
            ["start dev-2, dev-3, dev-4 again", "--min-contributors to 2"],
        ),
        ({"there": (), "asked": OTHER}, "", [f"start {', '.join(FIVE)} again"]),
        (
            {"asked": OTHER, "participation": 0.2},
            "none of its 5 devices online was drawn, and a mean takes 3",
            ["--participation to 0.6", "wait for its turn"],
        ),
        (
            {"asked": FIVE[:1], "participation": 0.2},
            "1 of its 5 devices online was drawn",
            ["--participation to 0.6", "--min-contributors to 1"],
        ),
        (
            {"asked": FIVE[:2]},
            "2 of its 5 devices online had an assignment",
            ["until dev-2, dev-3, dev-4 have a checkpoint", "--min-contributors to 2"],
        ),
        (
            {"used": FIVE[:1], "declined": FIVE[1:3]},
            "1 of 5 devices asked uploaded, and a mean takes 3 (dev-1, dev-2 declined)",
            ["wait for dev-3, dev-4", "log of dev-1, dev-2"],
        ),
        (
            {"used": FIVE[:2], "left_out": FIVE[2:]},
            "updates of dev-2, dev-3, dev-4 were left out, and a mean takes 3",
            [],
        ),
        ({}, "5 devices uploaded, and the algorithm left the model as it is", []),
    ],
    ids=[
        *("too few members", "too few of them online", "all offline", "its turn has not come", "too few drawn"),
        *("too few have an assignment", "too few uploads", "uploads left out", "enough that are not used"),
    ],
)
def test_reasons_of_a_standstill(changes, reason, hints):
    found, hint = reason_of(**changes)
    assert found.startswith(reason)
    assert [part for part in hints if part not in hint] == []


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"there": (), "asked": OTHER}, f"start {', '.join(FIVE)} again"),
        ({"asked": OTHER, "participation": 0.8}, "wait for its turn"),
    ],
    ids=["all offline", "a participation that would draw enough"],
)
def test_hint_that_is_all(changes, hint):
    assert reason_of(**changes)[1] == hint


@pytest.mark.parametrize("phase", [Phase.TRIAL, Phase.SCORE])
def test_trying_rounds_do_not_count(phase):
    """Rounds in which its devices try or score models do not count."""
    busy = dict.fromkeys(FIVE, dataclasses.replace(TRAIN, phase=phase))
    state, events = run(facts(r, asked={**busy, "other": TRAIN}) for r in range(1, 20))
    assert (state.rounds, events) == ({0: 0}, [])


def test_rounds_untrained_do_not_count():
    """Rounds in which nobody trains do not count."""
    pretrain = dict.fromkeys(FIVE, dataclasses.replace(TRAIN, phase=Phase.PRETRAIN))
    state, _ = run([facts(1, FIVE[:2]), *(facts(r, FIVE[:2], asked=pretrain) for r in range(2, 9))])
    assert state.rounds == {0: 1}


def test_clusters_in_turn_are_reported_once():
    """Four clusters, one a round: each stands still for three rounds of four."""
    clusters = {f"dev-{i:02d}": i % 4 for i in range(20)}
    state, told, versions = Standstill(), [], dict.fromkeys(range(4), 0)
    for round_ in range(1, 60):
        versions[round_ % 4] = round_
        models = {c: ClusterModel(version=v) for c, v in versions.items()}
        asked = [d for d, c in clusters.items() if c == round_ % 4]
        plan = RoundPlan(round_, models, dict.fromkeys(asked, TRAIN))
        seen = RoundFacts(plan=plan, clusters=clusters, models=models, there=clusters, used=asked)
        state, events = observe(state, seen, least=3, participation=0.25)
        told += events
    assert sorted(e.detail["cluster"] for e in told if e.kind == STANDS_STILL) == [0, 1, 2, 3]
    assert sorted(e.detail["cluster"] for e in told if e.kind == MOVES_AGAIN) == [0, 1, 2, 3]
    assert len(state.now) == 1


def test_unknown_model_is_not_judged():
    """A cluster without a known model is not judged."""
    state, events = run([dataclasses.replace(facts(r), models={9: ClusterModel()}) for r in range(1, 9)])
    assert (state.now, events) == ((), [])


def test_names_are_cut_after_some():
    assert named(FIVE) == ", ".join(FIVE)
    assert named([*FIVE, "a", "b"]).endswith(f" and {7 - NAMES_SHOWN} more")


rounds_seen = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30)


@given(rounds_seen)
def test_begin_and_end_alternate(seen):
    """Begin and end alternate and the state goes through the codec."""
    state, kinds = Standstill(), []
    version = 0
    for round_, (moved, here, asked) in enumerate(seen, 1):
        version = round_ if moved else version
        seen_now = facts(round_, there=FIVE[:here], asked={"other": TRAIN, **dict.fromkeys(FIVE[:asked], TRAIN)})
        seen_now = dataclasses.replace(
            seen_now, models={0: ClusterModel(version=version)}, clusters=dict.fromkeys(FIVE, 0)
        )
        state, events = observe(state, seen_now, least=3, participation=1.0)
        kinds += [e.kind for e in events]
        assert bool(state.now) == (round_ - version >= ROUNDS_STILL)
        assert bool(state.now) == bool(state.told)
        assert decode_state(Standstill, encode_state(state).document) == state
    assert kinds == [STANDS_STILL, MOVES_AGAIN] * (len(kinds) // 2) + [STANDS_STILL] * (len(kinds) % 2)
