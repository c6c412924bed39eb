"""CFL through rollovers: edges masked anew by their devices, what devices are told to keep, and newcomers without edges."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import dump_state
from aggregator.strategies.cfl import tree as cfl_tree
from aggregator.strategies.renewal import Renewal
from shoal.errors import KeyMismatchError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase
from tests.helpers.epochs import Fleet, samples_of
from tests.helpers.plans import contribution, contributions_in, run_plan
from tests.helpers.quadratics import ALG_5, DEVICES, GOAL, GROUP_OF, GROUPS, NOISE, TRIED, TRUTH, D, partition

LATE = {"new-9": "c", "new-1": "a", "new-4": "d", "new-7": "b"}
GOALS = {d: GOAL[g] + NOISE[d] for d, g in GROUP_OF.items()} | {d: GOAL[g] + 0.03 for d, g in LATE.items()}
ORIGIN = 0.1 * np.ones(D)


def cfl(epoch_rounds=30, **settings):
    """Return devices of four groups in a run whose mask changes, or does not with as many rounds as the run has."""
    run = run_plan("cfl", settings, segments=(SegmentSpec("cluster", D),), rounds=60, epoch_rounds=epoch_rounds)
    return Fleet(run, DEVICES, GOALS, origins=[ORIGIN], pull=1.0)


def assignments(rounds, of=None):
    """Return the orders of a round, of the last one by default."""
    return {d: o for r, d, o in rounds.asked if r == (of or rounds.round)}


def joined(rounds):
    return {e.detail["device"]: e.detail for e in rounds.events if e.kind == "newcomer"}


def home(rounds, device):
    """Return the leaf that holds a newcomer's group."""
    (leaf,) = {c.id for c in rounds.state.clusters.values() if set(GROUPS[LATE[device]]) <= set(c.members)}
    return leaf


@pytest.mark.parametrize("after", range(10))
def test_all_models_live_on_and_all_updates_of_edges_and_trials_are_asked_for(after):
    rounds = cfl(**TRIED).run_to(after)
    state = rounds.state
    inherited = rounds.strategy.inherited(state)
    halves = [h.model for t in state.trials.values() for h in (t.left, t.right)]
    assert sorted(inherited.models) == sorted([*state.clusters, *state.tree, *halves])
    cached = dataclasses.replace(state, newest={})
    assert inherited.own.keys() == contributions_in(cached).keys() == dump_state(cached).keys


@pytest.mark.parametrize("settings", [ALG_5, TRIED, {**TRIED, "trial_rounds": 1}], ids=["alg-5", "trials", "short"])
def test_devices_that_keep_what_they_are_told_mask_every_edge_anew(settings):
    """After any round, and again in the epoch after: a device need not hold more than it was told, and its last update."""
    for after in range(1, 16):
        rounds = cfl(**settings).run_to(after)
        for _ in range(2):
            cached = contributions_in(dataclasses.replace(rounds.state, newest={}))
            rounds.rollover()
            assert contributions_in(rounds.state).keys() == cached.keys()
            rounds.run_to(rounds.round + 2)


def test_nobody_is_told_to_keep_anything_where_one_epoch_covers_the_run():
    rounds = cfl(epoch_rounds=60, **TRIED).run_to(25)
    assert partition(rounds) == TRUTH
    assert not any(o.keep for _, _, o in rounds.asked)


def test_evidence_is_kept_from_the_first_order_after_the_trial_has_opened():
    rounds = cfl(**TRIED).run_to(5)
    opened = next(e.round for e in rounds.events if e.kind == "trial-opened")
    assert {o.keep for o in assignments(rounds, opened).values()} == {0}
    for later, phase in enumerate((Phase.TRIAL, Phase.TRIAL, Phase.SCORE), opened + 1):
        assert {(o.keep, o.phase) for o in assignments(rounds, later).values()} == {(opened, phase)}


def test_whoever_was_away_when_its_update_became_an_edge_hears_of_it_when_it_is_back():
    rounds = cfl(**ALG_5).run_to(2)
    (cut,) = [e.round for e in rounds.events if e.kind == "split"]
    gone = GROUPS["a"][0]
    rounds.step([d for d in DEVICES if d != gone])
    rounds.step()
    assert assignments(rounds)[gone].keep == cut


def test_a_refused_trial_leaves_nothing_to_keep():
    rounds = cfl(**{**TRIED, "margin": 50.0}).run_to(6)
    assert [e.kind for e in rounds.events] == ["trial-opened", "split-refused"]
    assert {o.keep for o in assignments(rounds).values()} == {0}


def test_newest_updates_are_forgotten_so_that_a_cut_takes_new_ones():
    """Devices that don't come back before the next cut are placed like newcomers, whatever they had sent before."""
    rounds = cfl(**{**ALG_5, "eps1": 1.5, "warm_up": 4}).run_to(4)
    assert set(rounds.state.newest) == set(DEVICES)
    rounds.rollover()
    assert not rounds.state.newest
    away = GROUPS["a"][0]
    rounds.step([d for d in DEVICES if d != away])
    assert rounds.events[-1].kind == "split"
    assert away in rounds.state.unplaced
    rounds.run_to(10)
    assert partition(rounds) == TRUTH


@pytest.mark.parametrize("gone", [(), tuple(g[0] for g in GROUPS.values())], ids=["all-renewed", "some-lost"])
def test_newcomers_descend_in_a_later_epoch_by_what_was_masked_anew(gone):
    rounds = cfl(**ALG_5).run_to(8)
    assert partition(rounds) == TRUTH
    rounds.rollover(gone=gone)
    edges = [e for n in rounds.state.tree.values() for e in n.edges]
    assert all(edges)
    assert not {c.device for e in edges for c in e} & set(gone)
    rounds.run_to(13, (*DEVICES, *LATE))
    assert {d: detail["cluster"] for d, detail in joined(rounds).items()} == {d: home(rounds, d) for d in LATE}
    assert not any("by" in detail for detail in joined(rounds).values())


@pytest.mark.parametrize("epoch_rounds", [30, 60], ids=["planned", "unplanned"])
def test_newcomers_take_the_leaf_of_least_loss_where_an_edge_is_empty(epoch_rounds):
    """In an epoch that ends unplanned nobody has kept anything; else whole sides may have stayed away."""
    rounds = cfl(epoch_rounds, **ALG_5).run_to(8)
    rounds.rollover(gone=DEVICES if epoch_rounds == 30 else ())
    assert not any(e for n in rounds.state.tree.values() for e in n.edges)
    assert not dump_state(rounds.state).keys
    rounds.reload()
    rounds.step((*DEVICES, *LATE))
    leaves = tuple(sorted(rounds.state.clusters))
    assert {(assignments(rounds)[d].phase, assignments(rounds)[d].candidates) for d in LATE} == {(Phase.TRAIN, leaves)}
    assert joined(rounds) == {d: {"device": d, "cluster": home(rounds, d), "by": "loss"} for d in LATE}
    assert not rounds.state.unplaced
    for cluster in rounds.state.clusters.values():
        assert cluster.slot.contributors == len(cluster.members) == 4, "the newcomer's own update counts"
        mean = np.average([GOALS[d] for d in cluster.members], 0, [samples_of(d) for d in cluster.members])
        np.testing.assert_allclose(rounds.theta(cluster.slot), mean, atol=1e-4)


def test_similarity_leads_down_to_the_node_whose_edge_is_empty_and_loss_from_there():
    """Only the innermost cut's updates are lost: the way there is Alg. 4's, and the choice is among the leaves below."""
    rounds = cfl(**ALG_5).run_to(8)
    (innermost,) = [n for n in rounds.state.tree.values() if all(c in rounds.state.clusters for c in n.children)]
    own = {c.key for e in innermost.edges for c in e}
    rounds.kept = {at: raw for at, raw in rounds.kept.items() if (at[1], 1, at[0]) not in own}
    rounds.last = {d: last for d, last in rounds.last.items() if (last[0], 1, d) not in own}
    rounds.rollover()
    assert [all(n.edges) for n in rounds.state.tree.values()] == [True, True, False]
    device = next(d for d, g in LATE.items() if home(rounds, d) in innermost.children)
    way = cfl_tree.path(rounds.state.tree, innermost.id)
    for _ in way:
        rounds.step((*DEVICES, device))
    asked = [o.candidates for _, d, o in rounds.asked if d == device]
    assert asked == [*((n,) for n in way[:-1]), tuple(sorted(innermost.children))]
    assert joined(rounds)[device] == {"device": device, "cluster": home(rounds, device), "by": "loss"}


def test_leaves_on_trial_are_not_chosen_and_where_all_are_a_newcomer_waits():
    rounds = cfl(60, **TRIED).run_to(5)
    assert len(rounds.state.tree) == 1
    rounds.step()
    while len(rounds.state.trials) < 1:
        rounds.step()
    rounds.rollover()
    (on_trial,) = rounds.state.trials
    free = tuple(sorted(set(rounds.state.clusters) - {on_trial}))
    _, plan = rounds.strategy.plan(rounds.state, rounds.round + 1, (*DEVICES, "new-1"))
    assert plan.assignments["new-1"].candidates == free
    trial = rounds.state.trials[on_trial]
    both = {leaf: dataclasses.replace(trial, cluster=leaf) for leaf in rounds.state.clusters}
    stuck = dataclasses.replace(rounds.state, trials=both)
    state, plan = rounds.strategy.plan(stuck, rounds.round + 1, (*DEVICES, "new-1"))
    assert "new-1" not in plan.assignments
    assert "new-1" in state.unplaced


def test_a_trial_goes_on_in_the_next_epoch_and_its_cut_may_have_no_edges():
    """The halves' models live on; without evidence the new node places nobody by similarity."""
    rounds = cfl(60, **TRIED).run_to(3)
    assert rounds.state.trials
    rounds.rollover(gone=DEVICES)
    (trial,) = rounds.state.trials.values()
    assert trial.evidence == ()
    assert (trial.left.slot.offset, trial.trained) == (None, 1)
    rounds.run_to(5)
    assert rounds.events[-1].kind == "split"
    assert rounds.state.tree[0].edges == ((), ())
    rounds.run_to(40)
    assert partition(rounds) == TRUTH


def test_a_newcomer_may_choose_a_leaf_that_is_being_checked():
    """Its update has no margins: the check hears the others, and the newcomer belongs to the leaf."""
    rounds = cfl(60, **{**ALG_5, "merge_every": 4}).run_to(6)
    rounds.rollover()
    while not any(
        rounds.round + 1 >= n.check_at and set(n.children) <= set(rounds.state.clusters)
        for n in rounds.state.tree.values()
    ):
        rounds.step()
    rounds.step((*DEVICES, *LATE))
    checked = {c for o in assignments(rounds).values() if o.phase == Phase.SCORE for c in o.candidates[:1]}
    assert checked & {detail["cluster"] for detail in joined(rounds).values()}
    assert joined(rounds).keys() == LATE.keys()
    assert [e.kind for e in rounds.events].count("merge") == 0


def test_an_update_under_a_third_key_is_refused():
    rounds = cfl(**ALG_5).run_to(4)
    inherited = rounds.strategy.inherited(rounds.state)
    key = min(inherited.own)
    stranger = contribution(key[2], np.ones(D), round=key[0], key_id=b"x" * 16)
    renewal = Renewal(4, {m: i for i, m in enumerate(sorted(inherited.models))}, own={key: stranger})
    with pytest.raises(KeyMismatchError, match=f"{key[2]} masked its update of round {key[0]}"):
        rounds.strategy.renewed(rounds.state, renewal)
