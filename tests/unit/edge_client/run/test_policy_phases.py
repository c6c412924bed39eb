"""Capabilities: a device pre-trains, reports margins and stores a path of models only if the owner's plan allows it."""

import dataclasses

import pytest

from edge_client.run.policy import check_assignment
from shoal.errors import UntrustedError
from shoal.protocol.documents import STATISTICS_SETTING, Capabilities
from shoal.protocol.messages import STATISTICS_MODEL, Announcement, Assignment, Phase, Share
from shoal.protocol.states import Offer, RoundModels, StateId
from tests.helpers.plans import run_plan

NAMES = [f.name for f in dataclasses.fields(Capabilities)]
TRAIN = Assignment(int(Phase.TRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)
SCORE = dataclasses.replace(TRAIN, phase=int(Phase.SCORE), share=int(Share.VALIDATION), train=False)
ASKS = {
    "pretrain": (dataclasses.replace(TRAIN, phase=int(Phase.PRETRAIN)), "to pre-train"),
    "margins": (dataclasses.replace(SCORE, margins=True), "to report margins"),
    "scale": (dataclasses.replace(TRAIN, norm=True), "to report a model's norm"),
    "keep_path": (dataclasses.replace(SCORE, phase=int(Phase.KEEP), evaluate=True), "to keep a path of models"),
}
"""Capability -> an order that needs it and no other, and the device's words for it."""


def announcement(plan, finished=False):
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
    check_assignment(ASKS[name][0], announcement(plan, finished=name == "keep_path"), plan)


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
        check_assignment(order, announcement(plan), plan)
        return
    with pytest.raises(UntrustedError, match=words):
        check_assignment(order, announcement(plan, finished=finished), plan)


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
        check_assignment(ASKS["keep_path"][0], announcement(plan), plan)


# ------------------------------------------------------------------------------------------------------ statistics


STATISTICS = dataclasses.replace(TRAIN, phase=int(Phase.STATISTICS), candidates=(STATISTICS_MODEL,))
WITH = run_plan(settings={STATISTICS_SETTING: "on"}, origins=2)


def offered(plan, *models):
    held = RoundModels(1, tuple(Offer(model, StateId(model, 2)) for model in sorted(models)))
    return dataclasses.replace(announcement(plan), held=held)


def test_statistics_are_sent_where_asked():
    """Statistics are sent where the owner asks for them."""
    check_assignment(STATISTICS, offered(WITH, STATISTICS_MODEL), WITH)
    check_assignment(TRAIN, offered(WITH, 0, STATISTICS_MODEL), WITH)


@pytest.mark.parametrize(
    ("order", "plan", "words"),
    [
        (STATISTICS, run_plan(), "to mix statistics and models"),
        (dataclasses.replace(STATISTICS, candidates=(0,)), WITH, "to mix statistics and models"),
        (dataclasses.replace(TRAIN, candidates=(STATISTICS_MODEL,)), WITH, "to mix statistics and models"),
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
