"""The opening of a round: devices that are left out, models that go back, sums that only the plan names."""

import dataclasses

import numpy as np
import pytest

from aggregator.rounds import opening
from aggregator.rounds.held_models import Evidence, Named
from aggregator.rounds.relay import States
from aggregator.strategies.base import ClusterModel, RoundPlan, place_assignment, train_assignment
from shoal.errors import IntegrityError
from shoal.protocol.messages import SHARED_MODEL, Phase
from shoal.protocol.states import StateId
from tests.helpers.held import NAMES, begun, held_plan, moved, rounds, update
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
    assert (ready.held, ready.events) == (held, ())
    held = rounds(2)
    orders = prepare((newest(held),), held, NAMES, RUN, planning()).plan.assignments
    assert all(not o.seal for o in orders.values()), "all are in step"


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
    assert (tuple(ready.plan.assignments), ready.plan.assignments["dev-3"].seal) == (there, (0,))
    declined = dataclasses.replace(held, lacking={"dev-4": 5, "dev-5": 5})
    assert prepare((newest(held),), declined, there, RUN, planning()) is None
    ready = prepare((newest(held),), held, there, RUN, planning(final=True), waited=False)
    assert (tuple(ready.plan.assignments), ready.checkpoints_only) == (there, False), (
        "the final round leaves nobody out"
    )
    assert prepare((newest(held),), held, there[1:], RUN, planning(final=True), waited=False) is None, (
        "but none holds it"
    )


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

    assert prepare((), held, NAMES, RUN, plan).plan.models == {7: ClusterModel(number)}


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
    assert (ready.before[1].origin, ready.held.states.next) == (9, 10)


# -- newcomers that compare directions --

DIRECTION, LATE = 7, "dev-5"
STATE = StateId(0, 1)
"""The state of the direction, which all but dev-5 have held since round 1."""


def placing_planning(state, there):
    """Return the plan of a round that places dev-5 if it is there; its other plan lets all train."""
    training = state, RoundPlan(9, {0: state[0]}, {d: train_assignment((0,), evaluate=False) for d in there})
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


def placed(devices=NAMES[:4], there=NAMES, sealed=None, **changes):
    """Return the round that opens with the direction at ``devices``, after changes to what is held."""
    state, held = with_a_direction(devices, sealed)
    return prepare(state, dataclasses.replace(held, **changes), there, RUN, placing_planning)


def phases(ready):
    return {d: o.phase for d, o in ready.plan.assignments.items()}


SEALED = dataclasses.replace(rounds(1, seal=lambda _: "dev-1").certified[0], state=STATE, round=4)


def test_newcomer_waits_for_what_it_lacks():
    """A newcomer waits while a device seals what it lacks."""
    ready = placed()
    assert phases(ready) == dict.fromkeys(NAMES[:4], Phase.TRAIN)
    assert {0, DIRECTION} == set(ready.plan.models)
    assert sorted(m for o in ready.plan.assignments.values() for m in o.seal) == [0, DIRECTION]
    assert ready.plan.otherwise is None
    assert placed().plan == ready.plan


def test_newcomer_with_checkpoint_is_placed():
    """A newcomer with a checkpoint is placed and nobody else is asked."""
    ready = placed(sealed=SEALED)
    assert phases(ready) == {LATE: Phase.PLACE}
    assert ready.plan.otherwise is None


def test_holders_are_not_needed_in_placement():
    """Devices without an assignment may lack what only newcomers compare with."""
    two, late = ("dev-1", "dev-2"), Named(0, (StateId(0, 0),))
    named = {**with_a_direction(two, SEALED)[1].named, "dev-3": late, "dev-4": late}
    assert list(phases(placed(two, sealed=SEALED, named=named))) == [LATE]


@pytest.mark.parametrize("signers", [(), ("dev-1",)])
def test_without_holder_other_plan_is_taken(signers):
    """No device holds it, or too few have signed it for a newcomer to believe it."""
    ready = placed(signers)
    assert phases(ready) == dict.fromkeys(NAMES, Phase.TRAIN)
    assert set(ready.plan.models) == {0}


def test_too_few_devices_take_the_other_plan():
    """The other plan is followed too if too few devices are left."""
    assert phases(placed(there=("dev-1", LATE))) == {"dev-1": Phase.TRAIN, LATE: Phase.TRAIN}


def test_left_out_devices_bring_no_placement():
    """A newcomer that lacks the model as well is left out, and the plan for the others is the other one again."""
    named = {d: n for d, n in with_a_direction(())[1].named.items() if d != "dev-4"}
    found = phases(placed((), named=named, lacking={"dev-4": 4}))
    assert found == dict.fromkeys(found, Phase.TRAIN)
    assert LATE in found
    assert "dev-4" not in found
