"""Devices that lack a state of a model, and the checkpoints that are ordered for them."""

import dataclasses

from aggregator.rounds.held_models import Evidence, Named, offers_of
from aggregator.rounds.missing_states import (
    CHECKPOINT_EVERY,
    FINAL_SEALERS,
    lost,
    sealing,
    unable,
    uncertifiable,
)
from aggregator.strategies.base import RoundPlan, train_assignment
from shoal.protocol.messages import DeclineReason
from shoal.protocol.states import StateId
from tests.helpers.held import NAMES, TRAIN, begun, damaged, held_plan, moved, plan_of, rounds, update
from tests.unit.aggregator.rounds.test_opening import dead_cluster


def waiting(held, there=NAMES):
    """Return the devices that can't take part in a round that all of them are asked for."""
    plan = plan_of(held, devices=there)
    return unable(held, plan, offers_of(plan, held.states), there, 2)


def test_lacking_compared_model_waits_too():
    """A device that lacks a model to compare with waits too."""
    held = rounds(1, devices=("dev-1", "dev-2"))
    held = dataclasses.replace(
        held, states=dataclasses.replace(held.states, names={**held.states.names, 7: StateId(1, 1)})
    )
    offers = {0: StateId(0, 1), 1: StateId(1, 1)}
    plan = RoundPlan(2, {}, {"dev-1": TRAIN, "dev-2": dataclasses.replace(TRAIN, compare=(0, 1))})
    assert unable(held, plan, offers, ("dev-1", "dev-2"), 2) == ("dev-2",)


def test_everybody_can_begin():
    """Before the first round has closed every device can take part."""
    assert waiting(begun(), ("dev-9",)) == ()


def test_missed_rounds_wait_for_a_checkpoint():
    """A device that missed three rounds waits for a checkpoint and a newcomer too."""
    held = rounds(3, held=rounds(1), devices=("dev-1", "dev-2"))
    there = (*NAMES, "dev-9")
    assert waiting(held, there) == ("dev-3", "dev-4", "dev-5", "dev-9")
    held = rounds(1, held=held, devices=("dev-1", "dev-2"), seal=lambda _: "dev-2")
    assert waiting(held, there) == ()
    # Under newer keys a newcomer can't open a checkpoint of the version before.
    assert "dev-9" in waiting(dataclasses.replace(held, key_version=4), there)


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
    assert "dev-3" in waiting(held)
    assert waiting(rounds(1, held=held, devices=("dev-1", "dev-2"), seal=lambda _: "dev-1")) == ()


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
    first, second = StateId(1, 0), StateId(1, 1)
    _, held, _ = dead_cluster()
    offers = {0: StateId(0, 4), 1: second}
    # Its statement says that dev-4 has taken the step of round 1; dev-3 was gone by then.
    named = {**held.named, "dev-4": Named(2, (StateId(0, 1), second))}
    # As if the mean of round 1 were announced no more, because a later one took its label.
    steps = tuple(kept for kept in held.steps if kept.step.round > 1)
    held = dataclasses.replace(held, named=named, steps=steps)
    plan = RoundPlan(5, {}, {"dev-1": train_assignment((0, 1), evaluate=False)})
    assert lost(held, plan, offers, ("dev-1", "dev-4"), 1) == {}
    assert lost(held, plan, offers, ("dev-1", "dev-3"), 1) == {1: first}
    assert lost(held, RoundPlan(5, {}, {"dev-1": TRAIN}), offers, ("dev-1", "dev-2"), 1) == {}
    comparing = RoundPlan(5, {}, {"dev-1": dataclasses.replace(TRAIN, compare=(1,))})
    assert lost(held, comparing, offers, ("dev-1", "dev-3"), 1) == {1: first}
