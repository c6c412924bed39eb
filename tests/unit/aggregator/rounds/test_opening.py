"""The opening of a round: devices that are left out, models that go back, sums that only the plan names.

Devices that lack a state of a model, and the checkpoints that are ordered for them.
"""

import dataclasses

import numpy as np
import pytest

from aggregator.rounds import opening
from aggregator.rounds.held_models import Evidence, Named, offers_of
from aggregator.rounds.opening import (
    CHECKPOINT_EVERY,
    FINAL_SEALERS,
    lost,
    sealing,
    unable,
    uncertifiable,
)
from aggregator.rounds.relay import States
from aggregator.strategies.base import ClusterModel, RoundPlan, place_assignment, train_assignment
from shoal.errors import IntegrityError
from shoal.protocol.messages import SHARED_MODEL, DeclineReason, Phase
from shoal.protocol.states import StateId
from tests.helpers.held import NAMES, ORIGIN, TRAIN, begun, damaged, held_plan, moved, plan_of, rounds, update
from tests.helpers.statements import digest

RUN = held_plan()


def planning(models=(0,), **changes):
    """Return the planning of a strategy whose state is its models by id."""

    def plan(state, there):
        assignment = train_assignment(tuple(models), evaluate=False)
        return state, RoundPlan(9, {m: state[m] for m in models}, dict.fromkeys(there, assignment), **changes)

    return plan


def prepare(before, held, available, run, planning, **options):
    """Prepare a round in which as many statements certify a state as a mean takes devices."""
    return opening.prepare(before, held, available, run, planning, signers=run.recipe.min_contributors, **options)


def newest(held):
    return ClusterModel(max(held.states.names))


def test_lacking_device_is_left_out():
    """A device without the model is left out and a checkpoint is ordered."""
    held = rounds(3, held=rounds(1), devices=("dev-1", "dev-2", "dev-3"))
    ready = prepare((newest(held),), held, NAMES, RUN, planning())
    assert list(ready.plan.assignments) == ["dev-1", "dev-2", "dev-3"]
    assert [o.seal for o in ready.plan.assignments.values() if o.seal] == [(0,)]
    assert ready.held == held
    assert ready.events == ()


def test_all_in_step_order_nothing():
    """A round in which all are in step orders nothing."""
    held = rounds(2)
    ready = prepare((newest(held),), held, NAMES, RUN, planning())
    assert all(not o.seal for o in ready.plan.assignments.values())


def test_too_few_holders_hand_the_model_over():
    """If too few hold the model they hand it over and the strategy does not see that round."""
    held = rounds(3, held=rounds(1), devices=("dev-1", "dev-2", "dev-3"))
    there = ("dev-2", "dev-3", "dev-4", "dev-5")
    few = held_plan(min_contributors=3)
    state = (newest(held),)
    held = dataclasses.replace(held, evidence={StateId(0, 4): Evidence(digest(StateId(0, 4)), {"dev-1": b"signed"})})
    ready = prepare(state, held, there, few, planning(), waited=False)
    assert ready.checkpoints_only
    assert (ready.before, ready.after, ready.held) == (state, state, held)
    orders = ready.plan.assignments
    assert list(orders) == ["dev-2", "dev-3"]
    assert {(o.phase, o.candidates, o.train, o.seal) for o in orders.values()} == {(Phase.SCORE, (0,), False, (0,))}
    (event,) = ready.events
    assert (event.kind, event.detail) == ("checkpoints_ordered", {"models": {"dev-2": [0], "dev-3": [0]}})
    assert prepare(state, held, there, few, planning()) == ready


def test_round_waits_for_holders_then_asks():
    """Without enough holders to certify the round waits and then asks each device once."""
    held = rounds(3, held=rounds(1), devices=("dev-1", "dev-2", "dev-3"))
    there = ("dev-3", "dev-4", "dev-5")
    assert prepare((newest(held),), held, there, RUN, planning(), waited=False) is None
    ready = prepare((newest(held),), held, there, RUN, planning())
    assert tuple(ready.plan.assignments) == there
    assert ready.plan.assignments["dev-3"].seal == (0,)
    declined = dataclasses.replace(held, lacking={"dev-4": 5, "dev-5": 5})
    assert prepare((newest(held),), declined, there, RUN, planning()) is None


def test_openable_model_goes_back_in_time():
    """After the deadline a model goes back if a device can open its checkpoint."""
    held = rounds(3, held=rounds(1, seal=lambda _: "dev-1"), devices=("dev-1", "dev-2"))
    back = dataclasses.replace(held.certified[0], round=2)
    held = dataclasses.replace(held, certified={0: back}, named={**held.named, "dev-3": Named(1, (StateId(0, 0),))})
    there = ("dev-3", "dev-4")
    assert prepare((newest(held),), held, there, RUN, planning(), waited=False) is None
    ready = prepare((newest(held),), held, there, RUN, planning())
    assert [(e.kind, e.detail) for e in ready.events] == [("model_went_back", {"model": 0, "from": 4, "to": 0})]
    assert tuple(ready.plan.assignments) == there


def test_nobody_is_left_out_of_final_round():
    """No device is left out of the final round unless none holds the model."""
    held = rounds(3, held=rounds(1), devices=("dev-1", "dev-2", "dev-3"))
    there = ("dev-3", "dev-4", "dev-5")
    ready = prepare((newest(held),), held, there, RUN, planning(final=True), waited=False)
    assert tuple(ready.plan.assignments) == there
    assert not ready.checkpoints_only
    assert prepare((newest(held),), held, there[1:], RUN, planning(final=True), waited=False) is None


def dead_cluster():
    """Return the models after four rounds; only devices that are gone hold model 1, which one of them sealed in round 1."""
    run, first = held_plan(origins=2), StateId(1, 0)
    updates = [update(d, 1, {StateId(0, 0), first}, run=run) for d in ("dev-1", "dev-2")]
    updates.append(update("dev-3", 1, {StateId(0, 0), first}, model=1, run=run, seals=((1, first),)))
    held = moved(begun(run), 1, updates, run=run, offers={0: StateId(0, 0), 1: first}, models=(0, 1))
    for r in (2, 3, 4):
        updates = [update(d, r, {StateId(0, r - 1)}, run=run) for d in ("dev-1", "dev-2")]
        held = moved(held, r, updates, run=run, offers={0: StateId(0, r - 1)})
    number = {state: n for n, state in held.states.names.items()}
    return run, held, (ClusterModel(number[StateId(0, 4)]), ClusterModel(number[StateId(1, 1)], version=1))


def test_unheld_model_is_seen_as_open():
    """A model that no device holds goes back and devices see it as open."""
    run, held, state = dead_cluster()
    ready = prepare(state, held, ("dev-1", "dev-2", "dev-9"), run, planning((0, 1)))
    event, ordered = ready.events
    assert (event.kind, event.detail) == ("model_went_back", {"model": 1, "from": 1, "to": 0})
    assert ordered.kind == "checkpoints_ordered", "only dev-9 can open the checkpoint of model 1"
    assert ready.held.states[ready.before[1].origin] == StateId(1, 0)
    assert StateId(1, 0) in ready.held.steps[-1].step.open
    assert StateId(1, 1) not in ready.held.steps[-1].step.open
    again = prepare(ready.before, ready.held, ("dev-1", "dev-2", "dev-9"), run, planning((0, 1)))
    assert (again.events, again.held, again.plan) == ((ordered,), ready.held, ready.plan)


def test_sum_that_became_a_state_is_offered():
    """A sum of models that became a state with the last step is offered as that state."""
    held = rounds(2)
    number = held.states.next
    held = dataclasses.replace(held, states=States({**held.states.names, number: StateId(7, 2)}, number + 1))
    total = ClusterModel(max(rounds(2).states.names), scale=0.5, others=((0.5, 0),))

    def plan(state, there):
        return state, RoundPlan(3, {7: total}, dict.fromkeys(there, train_assignment((7,), evaluate=False)), final=True)

    ready = prepare((), held, NAMES, RUN, plan)
    assert ready.plan.models == {7: ClusterModel(number)}


@pytest.mark.parametrize("moved_by", [np.ones(6, np.float32), None])
def test_model_not_to_be_made_is_not_offered(moved_by):
    """A mean that is no part of the last step, and before the first step a sum of others."""
    held = rounds(1) if moved_by is not None else begun()
    model = ClusterModel(offset=moved_by, scale=0.5)
    with pytest.raises(IntegrityError, match="at no state"):
        prepare((model,), held, NAMES, RUN, planning())


def test_shared_segment_is_offered_as_well():
    """The shared segment is offered and sealed too."""
    held = rounds(2)
    shared = ClusterModel(0)
    ready = prepare((newest(held),), held, NAMES, held_plan(participation=0.5), planning(shared=shared))
    assert ready.plan.shared is shared
    assert {m for o in ready.plan.assignments.values() for m in o.seal} <= {0, SHARED_MODEL}


def test_states_of_an_opening_keep_numbers():
    """The states of an opening keep their numbers."""
    run, held, state = dead_cluster()
    gone = dataclasses.replace(
        held, states=States({n: s for n, s in held.states.names.items() if s != StateId(1, 0)}, 9)
    )
    ready = prepare(state, gone, ("dev-1", "dev-2", "dev-9"), run, planning((0, 1)))
    assert ready.before[1].origin == 9
    assert ready.held.states.next == 10


# -- newcomers that compare directions --

DIRECTION, LATE = 7, "dev-5"
STATE = StateId(0, 1)
"""The state of the direction, which all but dev-5 have held since round 1."""


def placing_planning(state, there):
    """Return the plan of a round that places dev-5 if it is there; its other plan lets all train."""
    models = {0: state[0]}
    training = state, RoundPlan(9, models, {d: train_assignment((0,), evaluate=False) for d in there})
    if LATE not in there:
        return training
    plan = RoundPlan(9, {0: ClusterModel(0), DIRECTION: state[1]}, {LATE: place_assignment(0, (DIRECTION,))})
    return state, dataclasses.replace(plan, otherwise=training)


def with_a_direction(devices=NAMES[:4], sealed=None):
    """Return the strategy's state and the models after four rounds; all hold the origin, ``devices`` the direction's state."""
    held = rounds(4)
    number = held.states.next
    states = States({**held.states.names, number: STATE}, number + 1)
    origin = StateId(0, 0)
    named = {d: Named(4, (origin, *n.states, *([STATE] if d in devices else []))) for d, n in held.named.items()}
    known = Evidence(digest(STATE), dict.fromkeys(devices, b"signed"))
    held = dataclasses.replace(held, states=states, named=named, evidence={**held.evidence, STATE: known})
    if sealed is not None:
        held = dataclasses.replace(held, certified={**held.certified, DIRECTION: sealed})
    return (newest(dataclasses.replace(held, states=rounds(4).states)), ClusterModel(number)), held


def test_newcomer_waits_for_what_it_lacks():
    """A newcomer waits while a device seals what it lacks."""
    state, held = with_a_direction()
    ready = prepare(state, held, NAMES, RUN, placing_planning)
    orders = ready.plan.assignments
    assert list(orders) == list(NAMES[:4])
    assert {o.phase for o in orders.values()} == {Phase.TRAIN}
    assert {0, DIRECTION} == set(ready.plan.models)
    assert sorted(m for o in orders.values() for m in o.seal) == [0, DIRECTION]
    assert ready.plan.otherwise is None
    assert prepare(state, held, NAMES, RUN, placing_planning) == ready


def test_newcomer_with_checkpoint_is_placed():
    """A newcomer with a checkpoint is placed and nobody else is asked."""
    state, held = with_a_direction()
    sealed = dataclasses.replace(rounds(1, seal=lambda _: "dev-1").certified[0], state=STATE, round=4)
    state, held = with_a_direction(sealed=sealed)
    ready = prepare(state, held, NAMES, RUN, placing_planning)
    assert {d: o.phase for d, o in ready.plan.assignments.items()} == {LATE: Phase.PLACE}
    assert ready.plan.otherwise is None


def test_holders_are_not_needed_in_placement():
    """Devices without an assignment may lack what only newcomers compare with."""
    sealed = dataclasses.replace(rounds(1, seal=lambda _: "dev-1").certified[0], state=STATE, round=4)
    state, held = with_a_direction(devices=("dev-1", "dev-2"), sealed=sealed)
    late = Named(0, (StateId(0, 0),))
    held = dataclasses.replace(held, named={**held.named, "dev-3": late, "dev-4": late})
    assert list(prepare(state, held, NAMES, RUN, placing_planning).plan.assignments) == [LATE]


@pytest.mark.parametrize("signers", [(), ("dev-1",)])
def test_without_holder_other_plan_is_taken(signers):
    """No device holds it, or too few have signed it for a newcomer to believe it."""
    state, held = with_a_direction(devices=signers)
    ready = prepare(state, held, NAMES, RUN, placing_planning)
    assert list(ready.plan.assignments) == list(NAMES)
    assert {o.phase for o in ready.plan.assignments.values()} == {Phase.TRAIN}
    assert set(ready.plan.models) == {0}


def test_too_few_devices_take_the_other_plan():
    """The other plan is followed too if too few devices are left."""
    state, held = with_a_direction()
    ready = prepare(state, held, ("dev-1", LATE), RUN, placing_planning)
    assert {d: o.phase for d, o in ready.plan.assignments.items()} == {"dev-1": Phase.TRAIN, LATE: Phase.TRAIN}


def test_left_out_devices_bring_no_placement():
    """A newcomer that lacks the model as well is left out, and the plan for the others is the other one again."""
    state, held = with_a_direction(devices=())
    held = dataclasses.replace(held, named={d: n for d, n in held.named.items() if d != "dev-4"})
    held = dataclasses.replace(held, lacking={"dev-4": 4})
    ready = prepare(state, held, NAMES, RUN, placing_planning)
    assert LATE in ready.plan.assignments
    assert "dev-4" not in ready.plan.assignments
    assert {o.phase for o in ready.plan.assignments.values()} == {Phase.TRAIN}


def test_lacking_compared_model_waits_too():
    """A device that lacks a model to compare with waits too."""
    held = rounds(1, devices=("dev-1", "dev-2"))
    held = dataclasses.replace(
        held, states=dataclasses.replace(held.states, names={**held.states.names, 7: StateId(1, 1)})
    )
    offers = {0: StateId(0, 1), 1: StateId(1, 1)}
    comparing = dataclasses.replace(TRAIN, compare=(0, 1))
    plan = RoundPlan(2, {}, {"dev-1": TRAIN, "dev-2": comparing})
    assert unable(held, plan, offers, ("dev-1", "dev-2"), 2) == ("dev-2",)


def test_everybody_can_begin():
    """Before the first round has closed every device can take part."""
    held = begun()
    assert unable(held, plan_of(held, devices=("dev-9",)), {0: ORIGIN}, ("dev-9",), 2) == ()


def test_missed_rounds_wait_for_a_checkpoint():
    """A device that missed three rounds waits for a checkpoint and a newcomer too."""
    held = rounds(3, held=rounds(1), devices=("dev-1", "dev-2"))
    offers = offers_of(plan_of(held), held.states)
    there = (*NAMES, "dev-9")
    assert unable(held, plan_of(held, devices=there), offers, there, 2) == ("dev-3", "dev-4", "dev-5", "dev-9")
    held = rounds(1, held=held, devices=("dev-1", "dev-2"), seal=lambda _: "dev-2")
    offers = offers_of(plan_of(held), held.states)
    assert unable(held, plan_of(held, devices=there), offers, there, 2) == ()
    # Under newer keys a newcomer can't open a checkpoint of the version before.
    newer = dataclasses.replace(held, key_version=4)
    assert "dev-9" in unable(newer, plan_of(held, devices=there), offers, there, 2)


def test_earlier_checkpoint_is_no_help():
    """No checkpoint from before its decline helps a device that lacks a state."""
    held = rounds(2, devices=("dev-1", "dev-2"), seal=lambda _: "dev-1")
    held = moved(
        held,
        3,
        [update(d, 3, {StateId(0, 2)}) for d in ("dev-1", "dev-2")],
        declined={"dev-3": DeclineReason.STATE, "dev-4": DeclineReason.DATA},
    )
    assert held.lacking == {"dev-3": 3}
    assert "dev-3" in unable(held, plan_of(held), offers_of(plan_of(held), held.states), NAMES, 2)
    held = rounds(1, held=held, devices=("dev-1", "dev-2"), seal=lambda _: "dev-1")
    assert unable(held, plan_of(held), offers_of(plan_of(held), held.states), NAMES, 2) == ()


def seals(held, run=None, *, waiting=False, **plan):
    made, run = plan_of(held, **plan), run or held_plan()
    offers = offers_of(made, held.states)
    orders = sealing(held, made, offers, run, waiting=waiting, signers=run.recipe.min_contributors)
    return {d: o.seal for d, o in orders.items() if o.seal}


def test_what_orders_checkpoints():
    """Checkpoints are ordered for a waiting device a draw the final round and the strategy."""
    held = rounds(2)
    assert seals(held) == {}
    for found in (
        seals(held, waiting=True),
        seals(held, held_plan(participation=0.5)),
        seals(held, round_=20),
        seals(held, seal=frozenset({0})),
    ):
        assert list(found.values()) == [(0,)]
    assert list(seals(held, round_=21, final=True).values()) == [(0,)] * FINAL_SEALERS
    assert seals(held, seal=frozenset({5})) == {}


def test_departures_order_checkpoints():
    """A checkpoint is ordered once after a device has left and each time if few remain."""
    held = rounds(2)
    there = NAMES[:4]
    assert list(seals(held, devices=there).values()) == [(0,)]
    held = rounds(1, held=held, devices=there, seal=lambda _: "dev-1")
    assert seals(held, devices=there) == {}
    assert list(seals(held, devices=NAMES[:2]).values()) == [(0,)]
    held = rounds(1, held=held, devices=NAMES[:2], seal=lambda _: "dev-1")
    assert list(seals(held, devices=NAMES[:2]).values()) == [(0,)]


def test_checkpoint_every_ten_rounds():
    """A checkpoint is ordered every ten rounds and none has to come from the same devices."""
    held, ordered = begun(), {}
    for _ in range(3 * CHECKPOINT_EVERY):
        found = seals(held, held_plan(rounds=99))
        if found:
            ordered[held.closed + 1] = found
        held = rounds(1, held=held, seal=lambda _, found=found: next(iter(found), None))
    assert list(ordered) == [10, 20, 30]
    held = rounds(2)
    for every in (1, 2, 3, 5, 10):
        found = [next(iter(seals(held, round_=r, waiting=True))) for r in range(3, 3 + 40 * every, every)]
        assert set(found) == set(NAMES), f"a newcomer that waits {every} rounds for each meets all of them"
        assert max(map(found.count, NAMES)) < 20


def short(held, plan=None, available=("dev-1", "dev-2", "dev-3"), least=3):
    offers = {0: max(s for s in held.states.names.values() if s.model == 0)}
    plan = plan or RoundPlan(held.closed + 1, {}, dict.fromkeys(available, TRAIN))
    return uncertifiable(held, plan, offers, available, least)


def test_uncertifiable_model_goes_back():
    """A model that too few can certify goes back once it has stood still as long as it loses."""
    assert short(damaged(0)) == {}
    assert short(damaged(1)) == {0: StateId(0, 2)}
    held = damaged(1)
    later = dataclasses.replace(held.certified[0], state=StateId(0, 1))
    evidence = {**held.evidence, StateId(0, 1): held.evidence[StateId(0, 2)]}
    named = {d: Named(n.round, (*n.states, StateId(0, 1))) for d, n in held.named.items()}
    older = dataclasses.replace(held, certified={0: later}, evidence=evidence, named=named)
    assert short(older) == {}, "it would lose two rounds, and has stood still for one"
    assert short(dataclasses.replace(older, closed=older.closed + 1)) == {0: StateId(0, 1)}


def test_certifiable_model_stays():
    """A model stays that enough can certify or that has too few devices anyway."""
    held, newest = damaged(3), StateId(0, 3)
    assert short(held) == {0: StateId(0, 2)}
    assert short(held, available=("dev-1", "dev-2")) == {}
    known = held.evidence[newest]
    signed = Evidence(known.digest, {**known.statements, "dev-9": b"signed"})
    assert short(dataclasses.replace(held, evidence={**held.evidence, newest: signed})) == {}
    gone = dataclasses.replace(held, named={d: Named(n.round, (newest,)) for d, n in held.named.items()})
    assert short(gone) == {}, "nobody could hand the checkpoint over"


def test_only_a_device_in_step_seals():
    """Only a device in step is asked to seal first one that trained the model last."""
    held = rounds(3, held=rounds(1), devices=("dev-1", "dev-2"))
    assert set(seals(held, waiting=True)) <= {"dev-1", "dev-2"}
    held = dataclasses.replace(held, trained={"dev-1": 7, "dev-2": 0})
    assert list(seals(held, waiting=True)) == ["dev-2"]


def test_unheld_model_goes_back():
    """A model that no device holds goes back to its last certified checkpoint."""
    run = held_plan(origins=2)
    first, second = StateId(1, 0), StateId(1, 1)
    begin = begun(run)
    updates = [update(d, 1, {ORIGIN, first}, run=run) for d in ("dev-1", "dev-2")]
    updates.append(update("dev-3", 1, {ORIGIN, first}, model=1, run=run, seals=((1, first),)))
    held = moved(begin, 1, updates, run=run, offers={0: ORIGIN, 1: first}, models=(0, 1))
    offers = {0: StateId(0, 4), 1: second}
    for r in (2, 3, 4):
        updates = [update(d, r, {StateId(0, r - 1)}, run=run) for d in ("dev-1", "dev-2")]
        # Its statement says that dev-4 has taken the step of round 1; dev-3 was gone by then.
        updates += [update("dev-4", r, {StateId(0, r - 1), second}, run=run)] if r == 2 else []
        held = moved(held, r, updates, run=run, offers={0: StateId(0, r - 1)})
    # As if the mean of round 1 were announced no more, because a later one took its label.
    held = dataclasses.replace(held, steps=tuple(kept for kept in held.steps if kept.step.round > 1))
    plan = RoundPlan(5, {}, {"dev-1": train_assignment((0, 1), evaluate=False)})
    assert lost(held, plan, offers, ("dev-1", "dev-4"), 1) == {}
    assert lost(held, plan, offers, ("dev-1", "dev-3"), 1) == {1: first}
    assert lost(held, RoundPlan(5, {}, {"dev-1": TRAIN}), offers, ("dev-1", "dev-2"), 1) == {}
    comparing = RoundPlan(5, {}, {"dev-1": dataclasses.replace(TRAIN, compare=(1,))})
    assert lost(held, comparing, offers, ("dev-1", "dev-3"), 1) == {1: first}
