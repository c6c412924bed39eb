"""The device's policy: plans, announcements, recipes, means, assignments and phases that the owner did not sign are refused."""

import dataclasses

import pytest

from aggregator.strategies.base import place_assignment
from edge_client.run.policy import check_announcement, check_assignment, check_mean, mean_limit
from shoal.errors import UntrustedError
from shoal.protocol.documents import STATISTICS_SETTING, Capabilities, SegmentSpec
from shoal.protocol.messages import SHARED_MODEL, STATISTICS_MODEL, Announcement, Assignment, Phase, Share
from shoal.protocol.states import (
    CheckpointRef,
    MeanHeader,
    MeanRef,
    Offer,
    RetainedStep,
    RoundModels,
    StateId,
    StateRecipe,
    Step,
    Term,
)
from tests.helpers.keepers import plan_of
from tests.helpers.plans import run_plan

PLAN = run_plan(origins=2, max_models=3, rounds=9, min_contributors=3)
SHARING = run_plan(origins=1, max_models=2, rounds=9, segments=(SegmentSpec("shared", 5), SegmentSpec("cluster", 4)))
SCALING = dataclasses.replace(PLAN, capabilities=Capabilities(scale=True))
TRAIN = Assignment(Phase.TRAIN, (0,), Share.TRAIN, train=True, evaluate=False, margins=False)


def recipe(*weights, mean=None, model=0, round_=4):
    return StateRecipe(model, round_, tuple(Term(i, 1, w) for i, w in enumerate(weights)), mean)


def retained(*recipes, round_=4, contributors=3):
    means = tuple(MeanRef(r.model, "aa", bytes(16), contributors) for r in recipes if r.mean is not None)
    return RetainedStep(Step(round_, recipes, tuple(r.state for r in recipes)), means)


def checkpoint(state, round_):
    return CheckpointRef(StateId(*state), round_, 1, "aa", bytes(16))


def held(*offers, **parts):
    offers = offers or (Offer(0, StateId(0, 4)), Offer(1, StateId(1, 0)))
    return RoundModels(1, offers, **parts)


def announcement(plan=PLAN, round_=5, offered=None, **changes):
    fields = {
        "fleet": plan.fleet,
        "run": plan.run,
        "run_id": plan.run_id,
        "roster_sequence": 3,
        "round": round_,
        "nonce": bytes(16),
        "deadline_s": 60.0,
        "finished": round_ > plan.recipe.rounds,
        "assignments": (TRAIN,),
        "assignment_of": (0,),
        "held": offered or held(),
    }
    return Announcement(**{**fields, **changes})


@pytest.mark.parametrize(
    "models",
    [
        held(),
        held(steps=(retained(recipe(1.0, mean=1.0)),)),
        held(steps=(retained(recipe(0.25, 0.75, mean=1.0), recipe(1.0, model=2)),)),
        held(checkpoints=(checkpoint((0, 3), 4), checkpoint((1, 0), 5))),
    ],
)
def test_what_the_plan_allows_is_accepted(models):
    check_announcement(announcement(offered=models), PLAN)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fleet": "other"}, "another run"),
        ({"run": 2}, "another run"),
        ({"run_id": bytes(16)}, "another run"),
        ({"round": 0}, "round 0"),
        ({"round": 11}, "round 11"),
        ({"round": 10, "finished": False}, "round 10"),
        ({"finished": True}, "round 5"),
        ({"held": held(*(Offer(i, StateId(0, 0)) for i in range(4)))}, "4 models where the plan allows 3"),
        ({"held": held(Offer(0, StateId(0, 5)))}, "state 5 of model 0"),
        ({"held": held(Offer(0, StateId(2, 0)))}, "state 0 of model 2"),
        ({"held": held(Offer(0, StateId(0, 0)), Offer(SHARED_MODEL, StateId(0, 0)))}, "a shared part"),
        ({"held": held(steps=(retained(recipe(1.0, round_=5), round_=5),))}, "the step of round 5"),
        ({"held": held(steps=(retained(recipe(1.0, mean=1.0), contributors=2),))}, "a mean of 2 devices"),
        ({"held": held(steps=(retained(recipe(1.0, mean=2.0)),))}, "2 times the mean"),
        ({"held": held(steps=(retained(recipe(0.5, 0.4)),))}, "add up to 0.9"),
        ({"held": held(steps=(retained(recipe(2.0, -1.0)),))}, "add up to 1"),
        ({"held": held(steps=(retained(StateRecipe(0, 4, (Term(2, 0, 1.0),), None)),))}, "state 0 of model 2"),
        ({"held": held(checkpoints=(checkpoint((0, 5), 5),))}, "state 5 of model 0"),
        ({"held": held(checkpoints=(checkpoint((0, 3), 6),))}, "sealed in a later round"),
        ({"held": held(checkpoints=(checkpoint((0, 3), 3),))}, "before its state existed"),
    ],
)
def test_what_plan_does_not_allow_is_refused(changes, reason):
    with pytest.raises(UntrustedError, match=reason):
        check_announcement(announcement(**changes), PLAN)


@pytest.mark.parametrize("settings", [{}, {"eta_g": 0.01}])
def test_only_scale_allows_other_weights(settings):
    """The algorithm's settings decide nothing: devices do not read them."""
    bad = announcement(offered=held(steps=(retained(recipe(1.0, 0.3, mean=1.0)),)))
    check_announcement(bad, SCALING)
    plan = run_plan("fedgroup", settings, origins=2, max_models=3, rounds=9, min_contributors=3)
    with pytest.raises(UntrustedError, match="which the plan does not allow"):
        check_announcement(bad, plan)


def test_two_segments_allow_a_shared_part():
    """A plan with two segments allows a shared part."""
    both = held(Offer(0, StateId(0, 4)), Offer(SHARED_MODEL, StateId(SHARED_MODEL, 4)))
    check_announcement(announcement(SHARING, offered=both), SHARING)
    check_announcement(announcement(SHARING, offered=held(Offer(0, StateId(0, 4)))), SHARING)


def test_assignment_names_offered_models():
    """An assignment may name and seal offered models only."""
    announced = announcement()
    check_assignment(dataclasses.replace(TRAIN, candidates=(0, 1), seal=(1,)), announced, PLAN)
    with pytest.raises(UntrustedError, match="names a model that is not announced"):
        check_assignment(dataclasses.replace(TRAIN, candidates=(0, 2)), announced, PLAN)
    with pytest.raises(UntrustedError, match="seal a model that is not announced"):
        check_assignment(dataclasses.replace(TRAIN, seal=(2,)), announced, PLAN)


@pytest.mark.parametrize(
    ("changes", "round_", "match"),
    [
        ({"candidates": (1, 1)}, 5, "twice"),
        ({"phase": Phase.SCORE}, 5, "nothing to train for"),
        ({}, 10, "nothing to train for"),
        ({"margins": True}, 5, "at once"),
    ],
)
def test_orders(changes, round_, match):
    everything = Capabilities(**{f.name: True for f in dataclasses.fields(Capabilities)})
    plan = dataclasses.replace(PLAN, capabilities=everything)
    check_assignment(TRAIN, announcement(), plan)
    with pytest.raises(UntrustedError, match=match):
        check_assignment(dataclasses.replace(TRAIN, **changes), announcement(round_=round_), plan)


def test_norm_is_of_trained_model_if_allowed():
    """A norm is reported only of a trained model and with the capability."""
    report = dataclasses.replace(TRAIN, norm=True)
    check_assignment(report, announcement(), SCALING)
    with pytest.raises(UntrustedError, match="a model's norm, which the plan does not allow"):
        check_assignment(report, announcement(), PLAN)
    scoring = dataclasses.replace(report, train=False, phase=Phase.SCORE)
    with pytest.raises(UntrustedError, match="a model's norm, which the plan does not allow"):
        check_assignment(scoring, announcement(), SCALING)


def test_training_may_compare_if_allowed():
    """An assignment to train may compare offered models if the plan allows it."""
    announced, order = announcement(), dataclasses.replace(TRAIN, compare=(0, 1))
    comparing = dataclasses.replace(PLAN, capabilities=Capabilities(compare=True))
    check_assignment(order, announced, comparing)
    others = Capabilities(**{f.name: f.name != "compare" for f in dataclasses.fields(Capabilities)})
    for refused in (PLAN, dataclasses.replace(PLAN, capabilities=others)):
        with pytest.raises(UntrustedError, match="to compare models, which the plan does not allow"):
            check_assignment(order, announced, refused)
    with pytest.raises(UntrustedError, match="to compare models, which the plan does not allow"):
        check_assignment(dataclasses.replace(order, train=False, phase=Phase.SCORE), announced, comparing)
    for bad in ((0, 2), (1, 1), (SHARED_MODEL,)):
        with pytest.raises(UntrustedError, match="compare with a model that is not announced, or twice"):
            check_assignment(dataclasses.replace(order, compare=bad), announced, comparing)


@pytest.mark.parametrize("unit", [-1.0, float("inf"), float("nan")])
def test_steps_that_are_none(unit):
    short = plan_of(precision_up="float16")
    check_announcement(
        announcement(short, offered=RoundModels(1, (Offer(0, StateId(0, 0)),)), unit=0.5, round_=1), short
    )
    for plan in (short, plan_of()):
        with pytest.raises(UntrustedError, match="updates in steps of"):
            check_announcement(announcement(plan, unit=unit, round_=1), plan)


@pytest.mark.parametrize("plan", [PLAN, plan_of(), run_plan(precision_up="float16")])
def test_steps_where_the_plan_has_none(plan):
    with pytest.raises(UntrustedError, match=r"updates in steps of 0\.5"):
        check_announcement(announcement(plan, unit=0.5, round_=1), plan)


def test_placing_by_direction_if_allowed():
    """A device may be placed by direction if the plan allows comparisons."""
    comparing = dataclasses.replace(PLAN, capabilities=Capabilities(compare=True))
    order, announced = place_assignment(0, (1,)), announcement()
    check_assignment(order, announced, comparing)
    with pytest.raises(UntrustedError, match="to compare models, which the plan does not allow"):
        check_assignment(order, announced, PLAN)
    for bad in ({"compare": ()}, {"candidates": (0, 1)}):
        with pytest.raises(UntrustedError, match="to find a direction where there is nothing to compare"):
            check_assignment(dataclasses.replace(order, **bad), announced, comparing)
    with pytest.raises(UntrustedError, match="to find a direction where there is nothing to compare"):
        check_assignment(order, announcement(round_=PLAN.recipe.rounds + 1, finished=True), comparing)
    with pytest.raises(UntrustedError, match="to train where there is nothing to train for"):
        check_assignment(dataclasses.replace(order, train=True), announced, comparing)
    every = dataclasses.replace(PLAN, capabilities=Capabilities(compare=True, margins=True))
    with pytest.raises(UntrustedError, match="to train and report margins"):
        check_assignment(dataclasses.replace(order, margins=True), announced, every)


def test_a_mean_within_the_plan_is_accepted():
    check_mean(MEAN, PLAN, "", BYTES, 2.0, 2.0)
    shared = dataclasses.replace(MEAN, run_id=SHARING.run_id, length=5, segment="shared")
    check_mean(shared, SHARING, "shared", 20, 1.0, 2.0)


MEAN = MeanHeader(fleet=PLAN.fleet, run_id=PLAN.run_id, round=4, key_id=bytes(16), model=0, length=PLAN.length)
BYTES = 4 * PLAN.length


@pytest.mark.parametrize(
    ("changes", "size", "norm"),
    [
        ({"fleet": "atoll"}, BYTES, 1.0),
        ({"run_id": b"x" * 16}, BYTES, 1.0),
        ({"length": 1}, 4, 1.0),
        ({}, BYTES - 4, 1.0),
        ({"segment": "cluster"}, BYTES, 1.0),
        ({}, BYTES, 2.01),
        ({}, BYTES, float("nan")),
        ({}, BYTES, float("inf")),
    ],
)
def test_a_mean_beyond_the_plan_is_refused(changes, size, norm):
    with pytest.raises(UntrustedError):
        check_mean(dataclasses.replace(MEAN, **changes), PLAN, "", size, norm, 2.0)


SCALING = dataclasses.replace(PLAN, capabilities=Capabilities(scale=True))


@pytest.mark.parametrize(
    ("announced", "longest", "model_norm", "plan", "limit"),
    [
        (20.0, 2.0, 1.0, PLAN, 20.0),
        (PLAN.recipe.norm_limit * 2, 0.0, 1.0, PLAN, PLAN.recipe.norm_limit),
        (20.0, 0.1, 1.0, PLAN, 10.0),
        (20.0, 1e-9, 3.0, PLAN, 3.0),
        (90.0, 1e-9, 0.0, SCALING, 90.0),
    ],
    ids=["announced", "no update to compare with", "own update", "a model that fits already", "models are added"],
)
def test_the_norm_of_a_step_is_limited_by(announced, longest, model_norm, plan, limit):
    assert mean_limit(announced, longest, model_norm, plan) == limit


def test_limit_out_of_proportion_is_refused():
    assert mean_limit(100.0, 0.1, 1.0, PLAN) == 10.0
    with pytest.raises(UntrustedError, match="means of norm up to 101"):
        mean_limit(101.0, 0.1, 1.0, PLAN)


# -- Capabilities: a device pre-trains, reports margins and stores a path of models only if the owner's plan allows it --


NAMES = [f.name for f in dataclasses.fields(Capabilities)]
TRAINS = Assignment(int(Phase.TRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)
SCORE = dataclasses.replace(TRAINS, phase=int(Phase.SCORE), share=int(Share.VALIDATION), train=False)
ASKS = {
    "pretrain": (dataclasses.replace(TRAINS, phase=int(Phase.PRETRAIN)), "to pre-train"),
    "margins": (dataclasses.replace(SCORE, margins=True), "to report margins"),
    "scale": (dataclasses.replace(TRAINS, norm=True), "to report a model's norm"),
    "keep_path": (dataclasses.replace(SCORE, phase=int(Phase.KEEP), evaluate=True), "to keep a path of models"),
}
"""Capability -> an order that needs it and no other, and the device's words for it."""


def phase_of(plan, finished=False):
    round_ = plan.recipe.rounds + 1 if finished else 3
    return Announcement(
        fleet="demo",
        run=1,
        run_id=plan.run_id,
        roster_sequence=3,
        round=round_,
        nonce=bytes(16),
        deadline_s=60.0,
        finished=finished,
        assignments=(SCORE,),
        assignment_of=(0,),
        held=RoundModels(1, (Offer(0, StateId(0, 2)), Offer(1, StateId(1, 2)))),
    )


def check(name, plan):
    check_assignment(ASKS[name][0], phase_of(plan, finished=name == "keep_path"), plan)


def test_every_capability_is_asked_for():
    """Every capability that an order can need is asked for here or in test policy."""
    assert {*ASKS, "compare"} == set(NAMES)


@pytest.mark.parametrize(
    ("changes", "finished", "words"),
    [
        ({}, False, None),
        ({"train": False}, False, "to adapt models where there is nothing to report"),
        ({"margins": False}, False, "to adapt models where there is nothing to report"),
        ({"phase": Phase.TRAIN}, False, "to train and report margins at once"),
        ({}, True, "to train where there is nothing to train for"),
    ],
)
def test_adapting_and_comparing_is_one_order(changes, finished, words):
    """Models are adapted and compared in one order before the final round."""
    plan = run_plan(capabilities=Capabilities(margins=True))
    adapt = dataclasses.replace(SCORE, phase=Phase.ADAPT, candidates=(0, 1), train=True, margins=True)
    order = dataclasses.replace(adapt, **changes)
    if words is None:
        check_assignment(order, phase_of(plan), plan)
        return
    with pytest.raises(UntrustedError, match=words):
        check_assignment(order, phase_of(plan, finished=finished), plan)


@pytest.mark.parametrize("name", ASKS)
def test_order_needs_its_capability_only(name):
    """An order is followed with its capability alone."""
    check(name, run_plan(capabilities=Capabilities(**{name: True})))


@pytest.mark.parametrize("name", ASKS)
def test_order_is_refused_without_its_own(name):
    """An aggregator could otherwise learn more of devices, or have them work more, than the owner signed."""
    others = Capabilities(**{n: n != name for n in NAMES})
    with pytest.raises(UntrustedError, match=f"an order {ASKS[name][1]}, which the plan does not allow"):
        check(name, run_plan(capabilities=others))


@pytest.mark.parametrize(
    ("name", "algorithm", "settings"),
    [
        ("pretrain", "fedgroup", {}),
        ("margins", "cfl", {}),
        ("scale", "fedgroup", {"eta_g": "0.5"}),
        ("keep_path", "cfl", {"path": "on"}),
    ],
)
def test_settings_replace_no_capability(name, algorithm, settings):
    """Neither algorithm nor settings replace a capability."""
    with pytest.raises(UntrustedError, match="which the plan does not allow"):
        check(name, run_plan(algorithm, settings))


def test_path_is_stored_only_at_end_of_a_run():
    """Each stored model is a file on the device."""
    plan = run_plan(capabilities=Capabilities(keep_path=True))
    with pytest.raises(UntrustedError, match="path"):
        check_assignment(ASKS["keep_path"][0], phase_of(plan), plan)


# ------------------------------------------------------------------------------------------------------ statistics


STATISTICS = dataclasses.replace(TRAINS, phase=int(Phase.STATISTICS), candidates=(STATISTICS_MODEL,))
WITH = run_plan(settings={STATISTICS_SETTING: "on"}, origins=2)


def offered(plan, *models):
    held = RoundModels(1, tuple(Offer(model, StateId(model, 2)) for model in sorted(models)))
    return dataclasses.replace(phase_of(plan), held=held)


def test_statistics_are_sent_where_asked():
    """Statistics are sent where the owner asks for them."""
    check_assignment(STATISTICS, offered(WITH, STATISTICS_MODEL), WITH)
    check_assignment(TRAINS, offered(WITH, 0, STATISTICS_MODEL), WITH)


@pytest.mark.parametrize(
    ("order", "plan", "words"),
    [
        (STATISTICS, run_plan(), "to mix statistics and models"),
        (dataclasses.replace(STATISTICS, candidates=(0,)), WITH, "to mix statistics and models"),
        (dataclasses.replace(TRAINS, candidates=(STATISTICS_MODEL,)), WITH, "to mix statistics and models"),
        (dataclasses.replace(SCORE, candidates=(0, STATISTICS_MODEL)), WITH, "to mix statistics and models"),
        (dataclasses.replace(STATISTICS, candidates=(STATISTICS_MODEL, 0)), WITH, "that asks for more"),
        (dataclasses.replace(STATISTICS, evaluate=True), WITH, "that asks for more"),
        (dataclasses.replace(STATISTICS, train=False), WITH, "that asks for more"),
    ],
)
def test_statistics_order_asks_nothing_else(order, plan, words):
    """An order for statistics asks for nothing else."""
    with pytest.raises(UntrustedError, match=words):
        check_assignment(order, offered(plan, 0, STATISTICS_MODEL), plan)


def test_no_statistics_in_the_final_round():
    """There are no statistics in the final round."""
    final = dataclasses.replace(offered(WITH, STATISTICS_MODEL), round=WITH.recipe.rounds + 1, finished=True)
    with pytest.raises(UntrustedError, match="nothing to train for"):
        check_assignment(STATISTICS, final, WITH)
