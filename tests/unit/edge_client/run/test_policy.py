"""The device's policy: plans, announcements, recipes, means, assignments and phases that the owner did not sign are refused.

The plan and the task in a run package: only those that the owner has signed for this fleet.
"""

import dataclasses

import pytest

from aggregator.strategies.base import place_assignment
from crypto.seal.identity import sign_document
from edge_client.run.policy import (
    check_announcement,
    check_assignment,
    check_followable,
    check_mean,
    mean_limit,
    open_plan,
    owners_plan,
    task_of,
)
from shoal.errors import IntegrityError, ShoalError, UntrustedError, WireError
from shoal.protocol.codec import encode
from shoal.protocol.documents import STATISTICS_SETTING, Capabilities, RunPackage, SegmentSpec
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


@pytest.mark.parametrize(
    ("announced", "longest", "model_norm", "plan", "limit"),
    [
        (20.0, 2.0, 1.0, PLAN, 20.0),
        (PLAN.recipe.norm_limit * 2, 0.0, 1.0, PLAN, PLAN.recipe.norm_limit),
        (20.0, 0.1, 1.0, PLAN, 10.0),
        (100.0, 0.1, 1.0, PLAN, 10.0),
        (20.0, 1e-9, 3.0, PLAN, 3.0),
        (90.0, 1e-9, 0.0, SCALING, 90.0),
    ],
    ids=[
        "announced",
        "no update to compare with",
        "own update",
        "largest proportion",
        "a model that fits already",
        "models are added",
    ],
)
def test_the_norm_of_a_step_is_limited_by(announced, longest, model_norm, plan, limit):
    assert mean_limit(announced, longest, model_norm, plan) == limit


def test_limit_out_of_proportion_is_refused():
    with pytest.raises(UntrustedError, match="means of norm up to 101"):
        mean_limit(101.0, 0.1, 1.0, PLAN)


# -- Capabilities: a device pre-trains, reports margins and stores a path of models only if the owner's plan allows it --


"""Capability -> an order that needs it and no other, and the device's words for it."""


NAMES = [f.name for f in dataclasses.fields(Capabilities)]


def order(base=TRAIN, **changes):
    return dataclasses.replace(base, **changes)


def able(*names, plan=PLAN):
    """Return the plan with these capabilities."""
    return dataclasses.replace(plan, capabilities=Capabilities(**dict.fromkeys(names, True)))


SCORE = order(phase=Phase.SCORE, share=Share.VALIDATION, train=False)
KEEP = order(SCORE, phase=Phase.KEEP, evaluate=True)
ADAPT = order(SCORE, phase=Phase.ADAPT, candidates=(0, 1), train=True, margins=True)
PLACE = place_assignment(0, (1,))
STATISTICS = order(phase=Phase.STATISTICS, candidates=(STATISTICS_MODEL,))
WITH = run_plan(settings={STATISTICS_SETTING: "on"}, origins=2)
OPEN, FINAL = announcement(), announcement(round_=10)


def offered(*models):
    return announcement(WITH, offered=RoundModels(1, tuple(Offer(m, StateId(m, 2)) for m in sorted(models))))


STATISTICS_TOO = offered(0, STATISTICS_MODEL)


@pytest.mark.parametrize(
    ("name", "asked", "announced", "words", "algorithm", "settings"),
    [
        ("pretrain", order(phase=Phase.PRETRAIN), OPEN, "to pre-train", "fedgroup", {}),
        ("margins", order(SCORE, margins=True), OPEN, "to report margins", "cfl", {}),
        ("scale", order(norm=True), OPEN, "to report a model's norm", "fedgroup", {"eta_g": "0.5"}),
        ("keep_path", KEEP, FINAL, "to keep a path of models", "cfl", {"path": "on"}),
        ("compare", order(compare=(0, 1)), OPEN, "to compare models", "cfl", {}),
        ("compare", PLACE, OPEN, "to compare models", "cfl", {}),
    ],
)
def test_order_needs_its_own_capability(name, asked, announced, words, algorithm, settings):
    """An aggregator could otherwise learn more of devices, or have them work more, than the owner signed."""
    check_assignment(asked, announced, able(name))
    others = able(*(n for n in NAMES if n != name))
    for plan in (others, run_plan(algorithm, settings)):
        with pytest.raises(UntrustedError, match=f"an order {words}, which the plan does not allow"):
            check_assignment(asked, announced, plan)


def test_every_capability_is_asked_for():
    (table,) = [mark for mark in test_order_needs_its_own_capability.pytestmark if mark.name == "parametrize"]
    assert {row[0] for row in table.args[1]} == set(NAMES)


@pytest.mark.parametrize(
    ("asked", "announced", "plan"),
    [
        (order(candidates=(0, 1), seal=(1,)), OPEN, PLAN),
        (TRAIN, OPEN, able(*NAMES)),
        (ADAPT, OPEN, able("margins")),
        (STATISTICS, offered(STATISTICS_MODEL), WITH),
        (TRAIN, STATISTICS_TOO, WITH),
    ],
)
def test_orders_that_the_plan_allows(asked, announced, plan):
    check_assignment(asked, announced, plan)


@pytest.mark.parametrize(
    ("asked", "announced", "plan", "words"),
    [
        (order(candidates=(0, 2)), OPEN, PLAN, "names a model that is not announced"),
        (order(seal=(2,)), OPEN, PLAN, "seal a model that is not announced"),
        (order(candidates=(1, 1)), OPEN, able(*NAMES), "names a candidate twice"),
        (order(phase=Phase.SCORE), OPEN, able(*NAMES), "nothing to train for"),
        (TRAIN, FINAL, able(*NAMES), "nothing to train for"),
        (order(margins=True), OPEN, able(*NAMES), "at once"),
        (order(SCORE, norm=True), OPEN, SCALING, "a model's norm, which the plan does not allow"),
        (order(SCORE, compare=(0, 1)), OPEN, able("compare"), "to compare models, which the plan does not allow"),
        *(
            (order(compare=bad), OPEN, able("compare"), "compare with a model that is not announced, or twice")
            for bad in ((0, 2), (1, 1), (SHARED_MODEL,))
        ),
        *(
            (asked, announced, able("compare"), "to find a direction where there is nothing to compare")
            for asked, announced in (
                (order(PLACE, compare=()), OPEN),
                (order(PLACE, candidates=(0, 1)), OPEN),
                (PLACE, FINAL),
            )
        ),
        (order(PLACE, train=True), OPEN, able("compare"), "to train where there is nothing to train for"),
        (order(PLACE, margins=True), OPEN, able("compare", "margins"), "to train and report margins"),
        (order(ADAPT, train=False), OPEN, able("margins"), "to adapt models where there is nothing to report"),
        (order(ADAPT, margins=False), OPEN, able("margins"), "to adapt models where there is nothing to report"),
        (order(ADAPT, phase=Phase.TRAIN), OPEN, able("margins"), "to train and report margins at once"),
        (ADAPT, FINAL, able("margins"), "to train where there is nothing to train for"),
        (KEEP, OPEN, able("keep_path"), "to keep a path of models"),
        (STATISTICS, STATISTICS_TOO, run_plan(), "to mix statistics and models"),
        (order(STATISTICS, candidates=(0,)), STATISTICS_TOO, WITH, "to mix statistics and models"),
        (order(candidates=(STATISTICS_MODEL,)), STATISTICS_TOO, WITH, "to mix statistics and models"),
        (order(SCORE, candidates=(0, STATISTICS_MODEL)), STATISTICS_TOO, WITH, "to mix statistics and models"),
        (order(STATISTICS, candidates=(STATISTICS_MODEL, 0)), STATISTICS_TOO, WITH, "that asks for more"),
        (order(STATISTICS, evaluate=True), STATISTICS_TOO, WITH, "that asks for more"),
        (order(STATISTICS, train=False), STATISTICS_TOO, WITH, "that asks for more"),
        (
            STATISTICS,
            dataclasses.replace(STATISTICS_TOO, round=WITH.recipe.rounds + 1, finished=True),
            WITH,
            "nothing to train for",
        ),
    ],
)
def test_orders_that_the_plan_forbids(asked, announced, plan, words):
    with pytest.raises(UntrustedError, match=words):
        check_assignment(asked, announced, plan)


def packed(signer, **changes):
    """Return a run package without task and origins."""
    return encode(RunPackage(sign_document(signer, run_plan(**{"fleet": "reef", **changes})), b"", b""))


def test_the_owners_plan_is_returned(parties):
    """A plan that the owner did not sign is refused."""
    member = parties.members["dev-1"]
    package = packed(parties.owner.owner)
    assert open_plan(package, member) == owners_plan(package, member) == run_plan(fleet="reef")
    with pytest.raises(UntrustedError):
        owners_plan(packed(parties.server.identity), member)
    with pytest.raises(WireError):
        owners_plan(b"no package", member)


@pytest.mark.parametrize("changes", [{"fleet": "atoll"}, {"mode": "scramble"}])
def test_unfollowable_plan_is_the_owners(parties, changes):
    """So the device declines the rounds of that run."""
    member = parties.members["dev-1"]
    plan = owners_plan(packed(parties.owner.owner, **changes), member)
    for refuse in (
        lambda: check_followable(plan, member),
        lambda: open_plan(packed(parties.owner.owner, **changes), member),
    ):
        with pytest.raises(UntrustedError, match="a run plan") as caught:
            refuse()
        assert caught.value.hint or "fleet" in changes


def test_only_task_that_plan_names_is_opened(logistic):
    bundle = logistic(4, 3)
    plan = run_plan(task_digest=bundle.digest, segments=(SegmentSpec("cluster", 15),))
    data = memoryview(bundle.to_bytes())
    assert task_of(data, plan).digest == bundle.digest
    parted = dataclasses.replace(plan, segments=(SegmentSpec("shared", 12), SegmentSpec("cluster", 3)))
    for other in (dataclasses.replace(plan, task_digest=bytes(32)), parted):
        with pytest.raises(IntegrityError, match="not the one that the run plan names"):
            task_of(data, other)
    with pytest.raises(ShoalError):
        task_of(data[:-1], plan)
