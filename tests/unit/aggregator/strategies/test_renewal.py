"""A rollover changes no cluster and no model of any strategy, and leaves no trace of the old key."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel, dump_state
from aggregator.strategies.renewal import Renewal, fresh_slot, renewed_rows
from shoal.errors import IntegrityError
from shoal.protocol.documents import SegmentSpec
from tests.helpers.epochs import Fleet, assert_same
from tests.helpers.plans import FULL_BATCH, run_plan
from tests.helpers.quadratics import ALG_5, TRIED

D = 24
GROUPS = 3
DEVICES = tuple(f"dev-{i:02d}" for i in range(12))
RNG = np.random.default_rng(21)
CENTRES = 4.0 * np.eye(D)[:GROUPS]
GOALS = {d: CENTRES[i % GROUPS] + 0.02 * RNG.standard_normal(D) for i, d in enumerate((*DEVICES, "new-1", "new-2"))}
PROXIMAL = {"local": dataclasses.replace(FULL_BATCH, prox_mu=0.1)}
WHOLE = (SegmentSpec("cluster", D),)
PARTS = (SegmentSpec("cluster", 9), SegmentSpec("shared", D - 9))
CASES = {
    "fedavg": ("fedavg", {}, {}),
    "fedavg-sampled": ("fedavg", {}, {"participation": 0.5}),
    "fedprox": ("fedprox", {}, PROXIMAL),
    "local": ("local", {}, {"participation": 0.5}),
    "ifca": ("ifca", {"k": 3, "stable_rounds": 2, "probe_every": 3}, {"origins": 3}),
    "ifca-restarts": ("ifca", {"k": 3, "restarts": 3, "restart_rounds": 2}, {"origins": 9}),
    "ifca-sharing": ("ifca", {"k": 3}, {"origins": 3, "segments": PARTS}),
    "one-shot": ("one-shot", {"k": 3}, {}),
    "one-shot-origin": ("one-shot", {"k": 3, "start": "origin"}, {"participation": 0.5}),
    "cfl": ("cfl", ALG_5, {}),
    "cfl-tried": ("cfl", TRIED, {}),
    "cfl-checked": ("cfl", {**ALG_5, "merge_every": 3, "path": "on"}, {}),
    "fedgroup": ("fedgroup", {"groups": 3, "alpha": 2}, {}),
    "fedgroup-sampled": ("fedgroup", {"groups": 3, "alpha": 2, "start": "origin"}, {"participation": 0.5}),
    "fedgroup-rac": ("fedgroup", {"groups": 3, "alpha": 2, "rac": "on"}, {}),
    "fedgrouprox": ("fedgrouprox", {"groups": 3, "alpha": 2, "measure": "madc"}, PROXIMAL),
}
QUICK = {"fedavg-sampled", "ifca-restarts", "one-shot-origin", "cfl-tried", "fedgroup-rac"}
SHARED = [pytest.param(case, marks=() if case in QUICK else pytest.mark.long) for case in CASES]
"""The cases of every test here: one of each kind of strategy by default, all of them in `make long`."""


def fleet(case, rounds=40, **changes):
    algorithm, settings, own = CASES[case]
    fields = {"segments": WHOLE, "rounds": rounds, "epoch_rounds": 6, **own, **changes}
    run = run_plan(algorithm, settings, **fields)
    rng = np.random.default_rng(4)
    apart = [run.origins == GROUPS or i >= GROUPS for i in range(run.origins)]
    origins = [0.4 * far * CENTRES[i % GROUPS] + 0.3 * rng.standard_normal(D) for i, far in enumerate(apart)]
    return Fleet(run, DEVICES, GOALS, origins=origins, pull=1.0 if algorithm == "cfl" else 0.5)


def told(rounds):
    return [(e.round, e.kind) for e in rounds.events]


@pytest.mark.parametrize("after", [{0}, {1}, {2}, {3}, {5}, {2, 4, 9}, {3, 8}])
@pytest.mark.parametrize("case", SHARED)
def test_a_run_through_rollovers_is_the_run_without(case, after):
    """The same clusters in every round and the same models in the end, also where newcomers come after the rollover."""
    without, through = fleet(case), fleet(case)
    for round_ in range(1, 15):
        if round_ - 1 in after:
            through.rollover()
            if round_ % 2:
                through.reload()
        present = DEVICES if round_ < 11 else (*DEVICES, "new-1")
        assert without.step(present).clusters == through.step(present).clusters
        assert told(without) == told(through)
    assert_same(without, through, (*DEVICES, "new-1", "new-2"))


@pytest.mark.parametrize("case", SHARED)
def test_a_rollover_leaves_every_slot_at_an_origin_of_its_own(case):
    rounds = fleet(case).run_to(7)
    inherited = rounds.rollover()
    after = rounds.strategy.inherited(rounds.state)
    ids = sorted(after.models)
    assert len(ids) == len(inherited.models)
    assert [after.models[i] for i in ids] == [ClusterModel(i, None, 0, 7, 1.0) for i in range(len(ids))]


@pytest.mark.parametrize("case", SHARED)
def test_twice_in_a_row_is_as_good_as_once(case):
    """A revocation may follow a planned rollover with no round between."""
    once, twice = fleet(case).run_to(4), fleet(case).run_to(4)
    once.rollover()
    twice.rollover()
    twice.rollover()
    once.run_to(8)
    twice.run_to(8)
    assert_same(once, twice)


@pytest.mark.parametrize("case", SHARED)
def test_dump_and_load_in_a_later_epoch_change_nothing(case):
    plain, kept = fleet(case).run_to(6), fleet(case).run_to(6)
    for rounds in (plain, kept):
        rounds.rollover()
    kept.reload()
    for present in (DEVICES, (*DEVICES, "new-1"), (*DEVICES, "new-1"), DEVICES):
        assert plain.step(present) == kept.step(present)
        kept.reload()
    mine, theirs = dump_state(plain.state), dump_state(kept.state)
    assert mine.document == theirs.document
    assert {k: v.tobytes() for k, v in mine.arrays.items()} == {k: v.tobytes() for k, v in theirs.arrays.items()}


@pytest.mark.parametrize("after", [2, 5, 8])
@pytest.mark.parametrize("case", SHARED)
def test_a_revoked_device_is_forgotten_and_nobody_else(case, after):
    """For the others it is as if it had only stayed away, also after a restart."""
    away, revoked = fleet(case).run_to(after), fleet(case).run_to(after)
    for rounds in (away, revoked):
        rounds.rollover(gone=("dev-04",))
    others = tuple(d for d in DEVICES if d != "dev-04")
    revoked.state = revoked.strategy.retain(revoked.state, frozenset(others))
    assert "dev-04" not in json.dumps(dump_state(revoked.state).document)
    revoked.reload()
    for _ in range(6):
        expected, found = away.step(others).clusters, revoked.step(others).clusters
        assert "dev-04" not in found
        pairs = list(itertools.combinations(sorted(found.keys() & expected.keys()), 2))
        assert [found[a] == found[b] for a, b in pairs] == [expected[a] == expected[b] for a, b in pairs]
    assert set(revoked.strategy.final(revoked.state, 40, others).assignments) == set(others)


@pytest.mark.parametrize(("revoked", "machines"), [((), 12), (("dev-03", "dev-07"), 10)])
def test_the_machines_of_ifca_are_those_that_are_left(revoked, machines):
    """Alg. 1 divides the sum by m: a revoked device is none of the m machines."""
    plan = {"segments": WHOLE, "rounds": 20, "epoch_rounds": 6, "participation": 0.5}
    run = run_plan("ifca", {"k": 1, "normalise": "machines"}, **plan)
    rounds = Fleet(run, DEVICES, GOALS, origins=[np.zeros(D)]).run_to(1)
    rounds.rollover(gone=revoked)
    rounds.state = rounds.strategy.retain(rounds.state, frozenset(DEVICES) - set(revoked))
    before = rounds.theta(rounds.state.slots[0])
    rounds.step([d for d in DEVICES if d not in revoked])
    moved = rounds.theta(rounds.state.slots[0]) - before
    answers = [raw for round_, raw in rounds.last.values() if round_ == rounds.round]
    assert 0 < len(answers) < machines
    np.testing.assert_allclose(moved, np.sum(answers, axis=0) / machines, atol=1e-5)


def test_a_model_that_did_not_come_through_is_missed():
    renewal = Renewal(4, {0: 0, 7: 1})
    assert fresh_slot(renewal, 7) == ClusterModel(1, version=4)
    with pytest.raises(IntegrityError, match="model 3 did not come through the rollover after round 4"):
        fresh_slot(renewal, 3)


def test_carried_vectors_come_together_or_not_at_all():
    renewal = Renewal(4, {}, {"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)})
    assert [v.tolist() for v in renewed_rows(renewal, ["b", "a"])] == [[0.0, 0.0], [1.0, 1.0]]
    assert renewed_rows(renewal, ["a", "c"]) == ()
    assert renewed_rows(renewal, []) == ()
