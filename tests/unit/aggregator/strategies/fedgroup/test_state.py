"""FedGroup through rollovers: the auxiliary model, directions that are lost, and the end of inter-group aggregation."""

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from shoal.errors import ConfigError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase
from tests.helpers.epochs import Fleet, samples_of
from tests.helpers.plans import run_plan

D = 10
DEVICES = tuple(f"dev-{i:02d}" for i in range(8))
LATE = ("late-0", "late-1")
TRUTH = {d: i % 2 for i, d in enumerate((*DEVICES, *LATE))}
RNG = np.random.default_rng(6)
CENTRES = 5.0 * RNG.standard_normal((2, D))
GOALS = {d: CENTRES[g] + 0.2 * RNG.standard_normal(D) for d, g in TRUTH.items()}


def fedgroup(changes=None, **settings):
    fields = {"segments": (SegmentSpec("cluster", D),), **(changes or {})}
    return Fleet(run_plan("fedgroup", {"groups": 2, "alpha": 4, **settings}, **fields), DEVICES, GOALS)


def group_of(rounds, device):
    """Return the group that holds the devices of the same truth."""
    (group,) = {g for d, g in rounds.clusters.items() if TRUTH[d] == TRUTH[device]}
    return group


def test_before_the_cold_start_only_w_0_lives_on():
    rounds = fedgroup()
    assert rounds.rollover().models == {3: ClusterModel()}
    origin = rounds.state.origin
    assert (origin, rounds.state.auxiliary) == (ClusterModel(0), ClusterModel(0))
    rounds.step()
    assert [s.origin for s in rounds.state.slots] == [0, 0]
    assert not rounds.state.apart


def test_the_auxiliary_model_stays_the_mean_of_the_groups():
    """Right after a rollover, rounds later, and after another one; each group has an origin of its own by then."""
    rounds = fedgroup().run_to(3)
    assert sorted(rounds.rollover().models) == [0, 1, 2, 3]
    for rest in (0, 2, 3):
        rounds.run_to(rounds.round + rest)
        state = rounds.state
        assert [s.origin for s in (*state.slots, state.auxiliary, state.origin)] == [0, 1, 2, 3]
        mean = np.mean([rounds.theta(s) for s in state.slots], axis=0)
        np.testing.assert_allclose(rounds.theta(state.auxiliary), mean, rtol=1e-5, atol=1e-5)
        (ending,) = rounds.endings(("stranger",))["stranger"]
        np.testing.assert_allclose(ending, mean, rtol=1e-5, atol=1e-5)
        rounds.rollover()


def test_the_auxiliary_model_counts_the_groups_that_have_not_moved_since():
    rounds = fedgroup().run_to(2)
    rounds.rollover()
    rounds.step([d for d in DEVICES if rounds.clusters[d] == 1])
    assert [s.offset is None for s in rounds.state.slots] == [True, False]
    mean = np.mean([rounds.theta(s) for s in rounds.state.slots], axis=0)
    np.testing.assert_allclose(rounds.theta(rounds.state.auxiliary), mean, rtol=1e-5, atol=1e-5)


def test_newcomers_pretrain_from_w_0_and_follow_the_directions_in_a_later_epoch():
    rounds = fedgroup().run_to(2)
    carried = rounds.rollover().carried
    assert {name: c.contributors for name, c in carried.items()} == {"direction-0": 4, "direction-1": 4}
    assert {rounds.theta(rounds.state.origin).tobytes()} == {rounds.origins[3].astype(np.float64).tobytes()}
    rounds.step((*DEVICES, *LATE))
    assignments = {d: o for r, d, o in rounds.asked if r == 3}
    assert {d: (o.phase, o.candidates) for d, o in assignments.items()} == dict.fromkeys(LATE, (Phase.PRETRAIN, (3,)))
    assert [group_of(rounds, d) for d in LATE] == [rounds.clusters[d] for d in LATE]


@pytest.mark.parametrize("lost", [("direction-0",), ("direction-0", "direction-1")])
def test_without_all_directions_newcomers_take_the_group_of_least_loss(lost):
    """They train with the cohort that they were drawn in, and their updates count."""
    rounds = fedgroup().run_to(2)
    rounds.rollover(lost=lost)
    assert (rounds.state.directions, rounds.state.behind) == ((), ())
    rounds.reload()
    rounds.step((*DEVICES, *LATE))
    assert [e.kind for e in rounds.events if e.round > 1][-3:] == ["directions-lost", "newcomers", "discrepancy"]
    asked = {d: (o.phase, o.candidates) for r, d, o in rounds.asked if r == 3 and d in LATE}
    assert asked == dict.fromkeys(LATE, (Phase.TRAIN, (0, 1)))
    assert [group_of(rounds, d) for d in LATE] == [rounds.clusters[d] for d in LATE]
    assert [s.contributors for s in rounds.state.slots] == [5, 5]
    event = next(e for e in rounds.events if e.kind == "newcomers")
    assert event.detail == {"groups": {d: rounds.clusters[d] for d in LATE}, "by": "loss"}
    rounds.step((*DEVICES, *LATE))
    assert {len(o.candidates) for r, _, o in rounds.asked if r == 4} == {1}
    assert [e.kind for e in rounds.events].count("directions-lost") == 1


def test_directions_of_single_devices_are_lost_where_means_need_more():
    """RCC takes one device's update as a direction, which nobody else may see."""
    single, alone = fedgroup({"min_contributors": 3}, rcc="on"), fedgroup(rcc="on")
    for rounds in (single, alone):
        rounds.run_to(2)
        assert {c.contributors for c in rounds.rollover().carried.values()} == {1}
    assert not single.state.directions
    assert len(alone.state.directions) == 2


def test_rac_needs_no_directions():
    rounds = fedgroup(rac="on").run_to(2)
    assert not rounds.rollover().carried
    rounds.step((*DEVICES, *LATE))
    assert not [e for e in rounds.events if e.kind == "directions-lost"]
    assert {d: o.candidates for r, d, o in rounds.asked if r == 3 and d in LATE} == {
        d: (rounds.clusters[d],) for d in LATE
    }


def test_a_cohort_that_waits_for_its_newcomers_trains_in_the_next_epoch():
    rounds = fedgroup({"participation": 0.5}, alpha=1).run_to(2)
    cohort = rounds.state.cohort
    assert cohort
    rounds.rollover()
    rounds.step()
    assert {d for r, d, _ in rounds.asked if r == 3} == set(cohort)


def test_inter_group_aggregation_is_refused_where_the_mask_changes():
    with pytest.raises(ConfigError, match="changes after 19 of 20 rounds") as caught:
        fedgroup({"epoch_rounds": 19}, eta_g=0.1)
    assert "one mask epoch" in caught.value.hint
    fedgroup({"epoch_rounds": 19})


def test_a_rollover_that_was_not_planned_ends_inter_group_aggregation():
    """Models added up so far are folded with their scales; from then on groups go on by themselves, and once it is told."""
    rounds = fedgroup(eta_g=0.2).run_to(3)
    assert all(s.scale > 1 for s in rounds.state.slots)
    before = [rounds.theta(s) for s in (*rounds.state.slots, rounds.state.auxiliary)]
    rounds.rollover()
    for slot, theta in zip((*rounds.state.slots, rounds.state.auxiliary), before, strict=True):
        assert slot.scale == 1.0
        np.testing.assert_allclose(rounds.theta(slot), theta, rtol=1e-5, atol=1e-5)
    rounds.reload()
    rounds.run_to(5)
    assert not any(o.norm for r, _, o in rounds.asked if r > 3)
    assert all(o.norm for r, _, o in rounds.asked if 1 < r <= 3)
    assert [(e.round, e.kind) for e in rounds.events if e.kind.startswith("intergroup")] == [(3, "intergroup-ended")]
    for j, slot in enumerate(rounds.state.slots):
        assert (slot.origin, slot.scale) == (j, 1.0)
        mine = [d for d in DEVICES if rounds.clusters[d] == j]
        goal = np.average([GOALS[d] for d in mine], 0, [samples_of(d) for d in mine])
        np.testing.assert_allclose(rounds.theta(slot), goal + 0.25 * (before[j] - goal), rtol=1e-4, atol=1e-4)


def test_inter_group_aggregation_survives_a_rollover_before_the_cold_start():
    rounds = fedgroup(eta_g=0.2)
    rounds.rollover()
    rounds.run_to(3)
    assert all(s.scale > 1 for s in rounds.state.slots)
