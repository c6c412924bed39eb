"""CFL takes a split back that has stopped paying: when it asks, whom, what it makes of the answers, and what comes of it."""

import dataclasses

import numpy as np
import pytest

from shoal.protocol.messages import Phase, Share
from tests.helpers.plans import contribution
from tests.unit.aggregator.strategies.cfl.quadratics import (
    ALG_5,
    DEVICES,
    GROUPS,
    TRIED,
    TRUTH,
    Quadratic,
    Telling,
    cfl,
    partition,
    ran,
    settled_tree,
)

EVERY = 20
CHECKED = {**ALG_5, "merge_every": EVERY, "refused_cool_down": 5}


class Regretful(Quadratic):
    """As soon as it says so, devices score the model of a node better than that of their leaf."""

    def __init__(self, rounds, *, regret=True, of=DEVICES, goals=None):
        super().__init__(rounds, goals)
        self.regret, self.of = regret, set(of)

    def loss(self, device, model):
        if not (self.regret and device in self.of):
            return super().loss(device, model)
        spread = 0.01 * (int(device[-2:]) % 3)
        return 1.0 + spread if model in self.rounds.state.tree else 1.5 + 2 * spread


def pairs(rounds):
    """Return the nodes whose children are leaves."""
    state = rounds.state
    return [n for n in state.tree.values() if all(c in state.clusters for c in n.children)]


def run_to_check(rounds, answer):
    """Do rounds until the next one holds a check; return the node that it is about."""
    for _ in range(2 * EVERY):
        due = [n for n in pairs(rounds) if rounds.round + 1 >= n.check_at]
        if due:
            return due[0]
        rounds.step(answer)
    raise AssertionError("no check is due")


def regretted(**settings):
    """Return a fleet whose next round holds a check, its devices, which now regret their splits, and the node asked about."""
    rounds = cfl(**settings)
    answer = Regretful(rounds, regret=False)
    node = run_to_check(rounds, answer)
    answer.regret = True
    return rounds, answer, node


def kinds(rounds, *wanted):
    return [e.kind for e in rounds.events if e.kind in wanted]


def test_check_asks_leaves_for_margins():
    """The leaf's own model first, the one from before the cut second, on validation data; other clusters lose nothing."""
    rounds, answer, node = regretted(**CHECKED)
    members = {c: rounds.state.clusters[c].members for c in node.children}
    before = {c.id: c.slot for c in rounds.state.clusters.values()}
    answer.assignments.clear()
    rounds.step(answer)
    assignments = {d: o for _, d, o in answer.assignments}
    for child, devices in members.items():
        for device in devices:
            assignment = assignments[device]
            assert (assignment.phase, assignment.candidates) == (Phase.SCORE, (child, node.id))
            assert (assignment.share, assignment.train, assignment.evaluate) == (Share.VALIDATION, False, False)
            assert assignment.margins
    others = set(DEVICES) - {d for devices in members.values() for d in devices}
    assert len(others) == 6
    assert all(assignments[d].train and assignments[d].phase == Phase.TRAIN for d in others)
    for cluster in rounds.state.clusters.values():
        assert (cluster.slot is before[cluster.id]) == (cluster.id in node.children)


def test_unprofitable_split_is_taken_back():
    """After `patience` checks: the leaves are one cluster again, with the model from before the cut and all their members."""
    rounds, answer, node = regretted(**CHECKED, patience=2)
    leaves = [rounds.state.clusters[c] for c in node.children]
    rounds.step(answer)
    assert kinds(rounds, "merge", "split-doubted") == ["split-doubted"]
    assert run_to_check(rounds, answer).strikes == 1
    at = rounds.round + 1
    outcome = rounds.step(answer)
    whole = rounds.state.clusters[node.id]
    assert whole.slot is node.slot
    assert set(whole.members) == {*leaves[0].members, *leaves[1].members}
    assert whole.quiet_until == at + 1 + 5
    assert node.id not in rounds.state.tree
    assert not set(node.children) & set(rounds.state.clusters)
    assert {outcome.clusters[d] for d in whole.members} == {node.id}
    merge = next(e for e in rounds.events if e.kind == "merge")
    assert (merge.round, merge.detail["cluster"], merge.detail["strikes"]) == (at, node.id, 2)
    assert (sorted(merge.detail["sizes"]), min(merge.detail["prefer"])) == ([3, 3], 1.0)
    assert min(merge.detail["margin"]) > 0.4
    answer.regret = False
    rounds.go(answer, 12)
    again = [(e.round, e.detail["cluster"]) for e in rounds.events if e.kind == "split" and e.round > at]
    assert again[0] == (at + 6, node.id), "it can be cut again after its rest"
    assert partition(rounds) == TRUTH


class Lying(Telling, Regretful):
    """One device says the opposite of what it finds, as loud as it may."""

    def __init__(self, rounds, liar, **options):
        super().__init__(rounds, **options)
        self.liar = liar

    def told(self, device, margins, _round):
        return margins if device != self.liar else (0.0, -5.0 if margins[1] > 0 else 5.0)


@pytest.mark.parametrize("regret", [True, False])
@pytest.mark.parametrize("liar", ["dev-00", "dev-05", "dev-08"])
def test_one_false_margin_decides_nothing(liar, regret):
    """One false margin decides no merge of leaves of five."""
    devices = tuple(f"dev-{i:02d}" for i in range(10))
    goals = {d: 4.0 * np.eye(24)[i // 5] for i, d in enumerate(devices)}
    rounds = cfl(devices, **CHECKED, patience=1)
    answer = Lying(rounds, liar, regret=False, goals=goals)
    run_to_check(rounds, answer)
    answer.regret = regret
    answer.of = set(devices)
    rounds.step(answer)
    assert kinds(rounds, "merge", "split-doubted") == (["merge"] if regret else [])
    assert [e.detail["device"] for e in rounds.events if e.kind == "stands-apart"] == [liar]


def test_passed_check_restarts_the_count():
    """A check passed in between starts the count anew."""
    rounds = cfl(**CHECKED, patience=2)
    answer = Regretful(rounds, regret=False)
    for regret in (True, False, True):
        answer.regret = False
        node = run_to_check(rounds, answer)
        answer.regret = regret
        rounds.step(answer)
    assert kinds(rounds, "merge", "split-doubted") == ["split-doubted", "split-doubted"]
    assert rounds.state.tree[node.id].strikes == 1


def test_one_side_that_does_worse_is_enough():
    """The other side's gain does not make up for it: nobody shall be worse off than without the split."""
    rounds, answer, node = regretted(**CHECKED, patience=1)
    answer.of = set(rounds.state.clusters[node.children[0]].members)
    rounds.step(answer)
    assert kinds(rounds, "merge") == ["merge"]


def test_merges_go_up_the_tree():
    """When a pair is one leaf again, the node above it has two leaves and is asked in its turn."""
    rounds, answer, _ = regretted(**{**CHECKED, "refused_cool_down": 200}, patience=1)
    rounds.go(answer, 5)
    assert kinds(rounds, "merge") == ["merge"] * 3
    assert partition(rounds) == {frozenset(DEVICES)}
    assert not rounds.state.tree
    assert set(rounds.step(answer).clusters.values()) == {0}


@pytest.mark.parametrize("present", [1, 2])
def test_absent_devices_have_no_say(present):
    """One device of a leaf decides nothing, two do; the check comes again in its time."""
    rounds, answer, node = regretted(**CHECKED, patience=1, min_side=2)
    leaves = [rounds.state.clusters[c].members for c in node.children]
    there = [d for d in DEVICES if d not in {*leaves[0], *leaves[1]}] + [*leaves[0][:present], *leaves[1][:present]]
    at = rounds.round + 1
    rounds.step(answer, present=there)
    if present == 1:
        assert not kinds(rounds, "merge", "split-doubted")
        assert (rounds.state.tree[node.id].check_at, rounds.state.tree[node.id].strikes) == (at + EVERY, 0)
    else:
        assert kinds(rounds, "merge") == ["merge"]


def test_no_say_leaves_the_count():
    """Who has no say leaves the count as it was."""
    rounds, answer = ran(0, Regretful, **CHECKED, patience=2)
    node = run_to_check(rounds, answer)
    rounds.step(answer)
    run_to_check(rounds, answer)
    gone = {d for c in node.children for d in rounds.state.clusters[c].members}
    rounds.step(answer, present=[d for d in DEVICES if d not in gone])
    assert rounds.state.tree[node.id].strikes == 1
    run_to_check(rounds, answer)
    rounds.step(answer)
    assert kinds(rounds, "merge") == ["merge"]


def test_everybody_present_is_asked():
    """Everybody who is there is asked however few take part in training."""
    rounds = cfl(changes={"participation": 0.25}, **CHECKED)
    full, _, node = regretted(**CHECKED)
    state, plan = rounds.strategy.plan(full.state, full.round + 1, tuple(sorted(DEVICES)))
    scorers = {d for d, o in plan.assignments.items() if o.phase == Phase.SCORE}
    assert scorers == {d for c in node.children for d in state.clusters[c].members}
    assert sum(o.train for o in plan.assignments.values()) <= 3


def test_no_check_while_a_leaf_is_on_trial():
    """A pair one of whose leaves is on trial is asked when the trial is over."""
    rounds, answer = ran(0, **TRIED, merge_every=4)
    for _ in range(60):
        rounds.step(answer)
        tried = set(rounds.state.trials)
        _, plan = rounds.strategy.plan(rounds.state, rounds.round + 1, tuple(sorted(DEVICES)))
        for cluster in tried:
            phases = {plan.assignments[d].phase for d in rounds.state.clusters[cluster].members}
            halves = rounds.state.trials[cluster]
            known = {halves.left.model, halves.right.model, cluster}
            assert phases <= {Phase.TRIAL, Phase.ADAPT}
            assert all(set(plan.assignments[d].candidates) <= known for d in rounds.state.clusters[cluster].members)
    assert kinds(rounds, "split").count("split") == 3


def test_waiting_device_becomes_a_member():
    """A device that is to choose among the leaves below the very node that vanishes belongs to the cluster in its place."""
    rounds = cfl(**CHECKED, patience=1)
    answer = Regretful(rounds, regret=False)
    node = pairs(settled_tree(merge_every=EVERY, refused_cool_down=5))[0]
    while rounds.round + 1 < node.check_at:
        rounds.step(answer)
    # As if its update had been missing when the node was split.
    clusters, (late, *_) = rounds.state.clusters, sorted(GROUPS["c"])
    home = next(c for c in clusters.values() if late in c.members)
    left = dataclasses.replace(home, members=tuple(d for d in home.members if d != late))
    rounds.state = dataclasses.replace(rounds.state, clusters={**clusters, home.id: left}, unplaced={late: node.id})
    answer.regret = True
    rounds.step(answer)
    assert kinds(rounds, "merge") == ["merge"]
    assert set(rounds.state.clusters[node.id].members) == {*GROUPS["c"], *GROUPS["d"]}
    assert not rounds.state.unplaced


@pytest.mark.parametrize("settings", [{}, {"merge_every": 0}], ids=["alg-5-alone", "never"])
def test_unvalidated_checks_nothing(settings):
    """`validate = off` is the paper's Alg. 5 alone, unless a merge is asked for."""
    rounds, answer = ran(60, Regretful, **ALG_5, **settings)
    assert partition(rounds) == TRUTH
    assert {o.phase for _, _, o in answer.assignments} == {Phase.TRAIN}


@pytest.mark.parametrize("settings", [CHECKED, TRIED], ids=["as told", "by default"])
def test_checks_come_every_twenty_rounds(settings):
    """Of three nested splits only the innermost has two leaves; it is asked every `merge_every` rounds after the cut."""
    rounds, answer = ran(90, **settings)
    cut = [e.round for e in rounds.events if e.kind == "split"][-1]
    (innermost,) = pairs(rounds)
    scored = {(r, o.candidates[1]) for r, _, o in answer.assignments if o.phase == Phase.SCORE and r > cut}
    assert scored == {(r, innermost.id) for r in range(cut + EVERY, 91, EVERY)}
    assert partition(rounds) == TRUTH


def test_leaves_that_do_well_stay_apart():
    """No merge for equal losses, nor for a preference that chance explains."""
    rounds = cfl(**CHECKED, patience=1)
    rng = np.random.default_rng(5)

    def answer(device, assignment, round_):
        if not assignment.margins:
            return plain(device, assignment, round_)
        margins = (0.0, float(rng.normal(0.0, 0.1)))
        return contribution(device, round=round_, model=assignment.candidates[0], phase=Phase.SCORE, margins=margins)

    plain = Quadratic(rounds)
    rounds.go(answer, 65)
    assert partition(rounds) == TRUTH
