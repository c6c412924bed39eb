"""The device's policy for a rollover: its time, the vectors that may be carried, and those that must not be masked again."""

import dataclasses

import pytest

from edge_client.protocol.round_state import AgentState, Announced, Planned, step
from edge_client.run.policy import check_announcement, check_assignment, check_model
from shoal.errors import UntrustedError
from shoal.protocol.documents import Capabilities
from shoal.protocol.messages import (
    CARRIED_FIRST,
    PROPOSAL_MODEL,
    SHARED_MODEL,
    Announcement,
    Assignment,
    ModelHeader,
    ModelRef,
    Phase,
    Share,
)
from tests.helpers.plans import D, run_plan

BASE = run_plan(min_contributors=3, rounds=6, epoch_rounds=2, max_models=4)
PLAN = dataclasses.replace(BASE, capabilities=Capabilities(carry=True))
KEEPING = dataclasses.replace(BASE, capabilities=Capabilities(keep_updates=True))
SINCE, GENERATION = 2, 5
FOLD = Assignment(int(Phase.CHECKPOINT), (0,), int(Share.TRAIN), train=False, evaluate=False, margins=False)
SIGN = dataclasses.replace(FOLD, phase=int(Phase.ENDORSE))
TRAIN = dataclasses.replace(FOLD, phase=int(Phase.TRAIN), train=True)
MODEL = ModelRef(model=0, origin=0, label="aa", transfer=b"\1" * 16, contributors=3, norm=1.0)
CARRIED = ModelRef(model=CARRIED_FIRST, origin=0, label="bb", transfer=b"\2" * 16, contributors=3, norm=1.0, scale=0.0)
PROPOSAL = ModelRef(model=PROPOSAL_MODEL, origin=0, label="cc", transfer=b"\3" * 16, contributors=0, norm=0.0)
STEP = Announcement(
    fleet="demo",
    run=1,
    run_id=PLAN.run_id,
    epoch=1,
    key_id=PLAN.key_id,
    roster_sequence=3,
    round=SINCE + 2,
    nonce=bytes(16),
    deadline_s=60.0,
    finished=False,
    models=(MODEL,),
    assignments=(FOLD,),
    assignment_of=(0,),
    mode="permutation",
    step=1,
    carried=(CARRIED,),
    generation=GENERATION,
)
FRESH = dataclasses.replace(STEP, generation=GENERATION + 1, carried=())
ROUND = dataclasses.replace(STEP, step=0, round=SINCE + 1, carried=(), generation=0, assignments=(TRAIN,))


def check(announcement, plan=PLAN, **changes):
    check_announcement(dataclasses.replace(announcement, **changes), plan, SINCE, GENERATION)


def test_a_scheduled_rollover_comes_when_the_epoch_has_had_its_rounds():
    check(STEP)
    check(STEP, step=300)
    check(ROUND)


@pytest.mark.parametrize("round_", [2, 3, 5, 6])
def test_a_scheduled_rollover_comes_neither_early_nor_late_nor_again(round_):
    """The plan has a fixed number of epochs: with more the run would use the masks of another run."""
    with pytest.raises(
        UntrustedError, match=f"a rollover after round {round_}, under a mask of 2 rounds, used since 2"
    ):
        check(STEP, round=round_)


def test_no_epoch_begins_after_the_last_round():
    with pytest.raises(UntrustedError, match="a rollover after round 6"):
        check_announcement(dataclasses.replace(STEP, round=6), PLAN, 4, GENERATION)


@pytest.mark.parametrize("round_", [2, 3, 4, 5, 6])
def test_fresh_secrets_may_come_after_any_round(round_):
    check(FRESH, round=round_)


def test_fresh_secrets_may_come_before_the_first_round():
    check_announcement(dataclasses.replace(FRESH, round=0), PLAN, 0, GENERATION)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"round": 1}, "a rollover after round 1 of a run of 6"),
        ({"round": 7}, "a rollover after round 7 of a run of 6"),
        ({"finished": True}, "a rollover after round 4 of a run of 6"),
        ({"generation": GENERATION - 1}, "keys of roster 4 after 5"),
        ({"generation": 0}, "keys of roster 0 after 5"),
        ({"epoch": 2}, "another mask key"),
        ({"key_id": bytes(16)}, "another mask key"),
        ({"run_id": bytes(16)}, "another run"),
        ({"models": (MODEL, dataclasses.replace(MODEL, model=1, contributors=2))}, "a mean of 2 devices"),
        ({"models": (dataclasses.replace(MODEL, origin=1),)}, "origin 1 of 1"),
    ],
)
def test_a_rollover_out_of_place(changes, match):
    with pytest.raises(UntrustedError, match=match):
        check(FRESH, **changes)


@pytest.mark.parametrize("changes", [{"carried": (CARRIED,)}, {"proposal": PROPOSAL}, {"generation": GENERATION}])
def test_a_round_has_no_part_of_a_rollover(changes):
    with pytest.raises(UntrustedError, match="a round with the parts of a rollover"):
        check(ROUND, **changes)


def test_no_vector_is_carried_to_a_new_key_version():
    """A revoked device knows the old mask: with the aggregator it would learn the new one from a single vector."""
    with pytest.raises(UntrustedError, match="in a rollover to a new key version"):
        check(FRESH, carried=(CARRIED,))


CARRIES = {
    "a model's number": ({"model": 1}, "vector 1 is a model"),
    "a model's scale": ({"scale": 1.0}, "is a model"),
    "no transfer": ({"transfer": bytes(16)}, "is a model"),
    "too few devices": ({"contributors": 2}, "a mean of 2 devices"),
    "the shared part's number": ({"model": SHARED_MODEL}, "names a vector twice"),
    "the checkpoint's number": ({"model": PROPOSAL_MODEL}, "names a vector twice"),
}


@pytest.mark.parametrize("case", CARRIES)
def test_carried_vectors_and_models_do_not_pass_for_each_other(case):
    changes, match = CARRIES[case]
    with pytest.raises(UntrustedError, match=match):
        check(STEP, carried=(dataclasses.replace(CARRIED, **changes),))


def test_a_vector_is_named_once():
    with pytest.raises(UntrustedError, match="names a vector twice"):
        check(STEP, carried=(CARRIED, CARRIED))


def test_vectors_are_carried_only_with_the_capability_and_no_more_than_models():
    with pytest.raises(UntrustedError, match="1 vectors that are no models"):
        check(STEP, KEEPING)
    many = tuple(dataclasses.replace(CARRIED, model=CARRIED_FIRST + i) for i in range(5))
    with pytest.raises(UntrustedError, match="5 vectors that are no models"):
        check(STEP, carried=many)


def test_a_model_is_not_announced_with_the_number_of_a_vector():
    with pytest.raises(UntrustedError, match="which no model has"):
        check(STEP, models=(dataclasses.replace(MODEL, model=CARRIED_FIRST),))


def test_the_checkpoint_has_its_own_number():
    check(STEP, proposal=PROPOSAL, carried=())
    with pytest.raises(UntrustedError, match="a checkpoint under a model's number"):
        check(STEP, proposal=dataclasses.replace(PROPOSAL, model=1), carried=())


# ---------------------------------------------------------------------------------------------------- orders


def assignment(order_, announcement, plan=KEEPING):
    check_assignment(order_, announcement, plan, GENERATION)


SIGNING = dataclasses.replace(STEP, carried=(), proposal=PROPOSAL)


def test_orders_of_a_rollover():
    assignment(FOLD, STEP)
    assignment(SIGN, SIGNING)
    assignment(dataclasses.replace(SIGN, renew=(1, 2)), SIGNING)


@pytest.mark.parametrize(
    ("order_", "announcement", "match"),
    [
        (TRAIN, STEP, "work of a round in a rollover"),
        (FOLD, ROUND, "a rollover in a round"),
        (SIGN, ROUND, "a rollover in a round"),
        (SIGN, STEP, "an order to sign without a proposed checkpoint"),
        (FOLD, SIGNING, "to fold despite one"),
        (dataclasses.replace(FOLD, train=True), STEP, "an order to train"),
        (dataclasses.replace(FOLD, renew=(1,)), STEP, "mask one again outside the signing step"),
        (dataclasses.replace(TRAIN, renew=(1,)), ROUND, "mask one again outside the signing step"),
        (dataclasses.replace(SIGN, candidates=(1,)), SIGNING, "not announced"),
    ],
)
def test_orders_out_of_turn(order_, announcement, match):
    with pytest.raises(UntrustedError, match=match):
        assignment(order_, announcement)


def test_no_update_is_masked_again_for_a_new_key_version():
    fresh = dataclasses.replace(SIGNING, generation=GENERATION + 1)
    assignment(SIGN, fresh)
    with pytest.raises(UntrustedError, match="in a rollover to a new key version"):
        assignment(dataclasses.replace(SIGN, renew=(1,)), fresh)


@pytest.mark.parametrize("changes", [{"renew": (1,)}, {"keep": 1}])
def test_updates_are_cached_and_masked_again_only_with_the_capability(changes):
    assignment(dataclasses.replace(SIGN, **changes), SIGNING)
    with pytest.raises(UntrustedError, match="keep updates, which the plan does not allow"):
        assignment(dataclasses.replace(SIGN, **changes), SIGNING, PLAN)


def test_a_carried_vector_is_no_model_without_the_capability():
    """Its offset alone, of scale 0, would otherwise pass for one."""
    header = ModelHeader(
        fleet="demo",
        run_id=PLAN.run_id,
        epoch=1,
        key_id=PLAN.key_id,
        model=CARRIED_FIRST,
        origin=0,
        round=3,
        length=D,
        scale=0.0,
    )
    check_model(header, PLAN, 4 * D, 1.0)
    with pytest.raises(UntrustedError, match="0 times its origin"):
        check_model(header, KEEPING, 4 * D, 1.0)


# ---------------------------------------------------------------------------------------------------- the agent


def followed():
    state, _ = step(AgentState(0), Planned(PLAN, SINCE, GENERATION))
    return state


def test_the_state_machine_checks_announcements_against_its_epoch():
    state, do = step(followed(), Announced(STEP))
    assert state.announcement == STEP
    assert do
    for bad in (
        dataclasses.replace(STEP, round=3),
        dataclasses.replace(STEP, generation=4),
        dataclasses.replace(FRESH, carried=(CARRIED,)),
    ):
        with pytest.raises(UntrustedError):
            step(followed(), Announced(bad))


def test_the_state_machine_refuses_to_mask_updates_for_a_new_key_version():
    state, _ = step(AgentState(0), Planned(KEEPING, SINCE, GENERATION))
    renewing = dataclasses.replace(SIGN, renew=(1,))
    scheduled = dataclasses.replace(SIGNING, assignments=(renewing,))
    assert step(state, Announced(scheduled))[0].assignment == renewing
    with pytest.raises(UntrustedError, match="in a rollover to a new key version"):
        step(state, Announced(dataclasses.replace(scheduled, generation=GENERATION + 1)))


def test_a_new_epoch_forgets_the_step_that_led_to_it():
    """It also refuses all announcements of the epoch before."""
    state, _ = step(followed(), Announced(STEP))
    later = PLAN.in_epoch(2, b"n" * 16)
    state, _ = step(state, Planned(later, SINCE + 2, GENERATION))
    assert (state.announcement, state.assignment, state.since) == (None, None, SINCE + 2)
    with pytest.raises(UntrustedError, match="another mask key"):
        step(state, Announced(dataclasses.replace(ROUND, round=5)))
    here = {"epoch": 2, "key_id": b"n" * 16}
    with pytest.raises(UntrustedError, match="a rollover after round 4"):
        step(state, Announced(dataclasses.replace(STEP, step=3, **here)))
    assert step(state, Announced(dataclasses.replace(ROUND, round=5, **here)))[0].mark.place == (1, 5, 0)
