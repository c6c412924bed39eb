"""Models, statements, checkpoints and updates made by hand, for tests of the engine without a network."""

import dataclasses

import numpy as np

from aggregator.rounds.held_models import HeldModels, after_round, agree
from aggregator.rounds.relay import RelayedStep, States
from aggregator.strategies.base import ClientUpdate, ClusterModel, RoundPlan, train_assignment
from shoal.protocol.messages import DeclineReason, Phase
from shoal.protocol.states import StateId
from tests.helpers.plans import ROUND_KEY, run_plan
from tests.helpers.statements import sealed_checkpoints, signed_statement

ORIGIN = StateId(0, 0)
TRAIN = train_assignment((0,), evaluate=False)
NAMES = ("dev-1", "dev-2", "dev-3", "dev-4", "dev-5")


def held_plan(**changes):
    """Return a plan in which two devices certify a state."""
    return run_plan(**{"min_contributors": 2} | changes)


def update(device, round_, states, *, model=0, run=None, seals=(), kinds=None, key_id=ROUND_KEY, trained=True):
    """Return an update whose statement names ``states``, with checkpoints of ``seals``, pairs (model, state)."""
    run = run or held_plan()
    statement = signed_statement(device, run, round_, states, kinds=kinds)
    attached = sealed_checkpoints(device, run, round_, seals) if seals else b""
    return ClientUpdate(
        round=round_,
        phase=Phase.TRAIN,
        device=device,
        model=model,
        samples=1,
        loss=1.0,
        key_id=key_id,
        vector=np.ones(run.length, np.float32) if trained else None,
        norm=1.0,
        attached=attached,
        statement=statement,
    )


def begun(run=None, devices=NAMES, **changes):
    """Return the models before round 1."""
    return dataclasses.replace(HeldModels.begin(run or held_plan(), devices, 3), **changes)


def moved(held, round_, updates, *, run=None, offers=None, models=(0,), declined=None):
    """Return the models after a round in which each of ``models`` moved by a mean."""
    run = run or held_plan()
    offers = offers or {m: max(s for s in held.states.names.values() if s.model == m) for m in models}
    agreement = agree(held, offers, updates)
    mean = np.full(run.length, round_, np.float32)
    steps, names, number = [], dict(held.states.names), held.states.next
    for model in models:
        new = StateId(model, round_)
        steps.append(RelayedStep(new, ((1.0, offers[model]),), mean, len(updates)))
        names = {n: s for n, s in names.items() if s != offers[model] or s.round == 0}
        names[number] = new
        number += 1
    used = frozenset(n for n, s in names.items() if s.round)
    return after_round(
        held,
        round_,
        run=run,
        offers=offers,
        agreement=agreement,
        given=updates,
        declined=declined or {},
        settled=(States(names, number), tuple(steps), used),
        models=offers,
        signers=run.recipe.min_contributors,
    )


def rounds(count, *, devices=NAMES, held=None, seal=None, run=None):
    """Return the models after ``count`` rounds of one model; ``seal(round)`` names the device that seals."""
    held = held or begun(run)
    for round_ in range(held.closed + 1, held.closed + 1 + count):
        state = StateId(0, round_ - 1)
        sealer = seal(round_) if seal else None
        updates = [update(d, round_, {state}, run=run, seals=((0, state),) if d == sealer else ()) for d in devices]
        held = moved(held, round_, updates, run=run)
    return held


def plan_of(held, round_=None, devices=NAMES, **changes):
    """Return the plan of a round in which the devices train the newest state."""
    (number,) = [n for n, s in held.states.names.items() if s == max(held.states.names.values())]
    return RoundPlan(round_ or held.closed + 1, {0: ClusterModel(number)}, dict.fromkeys(devices, TRAIN), **changes)


def damaged(count):
    """Return three devices' models: certified at round 2 in round 3, two hold (0, 3) for ``count`` rounds, one has lost it."""
    run, trio = held_plan(min_contributors=3), NAMES[:3]
    held = rounds(3, devices=trio, held=begun(run, trio), run=run, seal=lambda r: "dev-1" if r == 3 else None)
    for round_ in range(4, 4 + count):
        states = {StateId(0, 2), StateId(0, 3)} & (held.held_by("dev-2") | {StateId(0, 3)})
        updates = [update(d, round_, states, run=run) for d in trio[:2]]
        held = after_round(
            held,
            round_,
            run=run,
            offers={0: StateId(0, 3)},
            agreement=agree(held, {0: StateId(0, 3)}, updates),
            given=updates,
            declined={"dev-3": DeclineReason.STATE},
            settled=(held.states, (), frozenset(n for n, s in held.states.names.items() if s.round)),
            models=(0,),
            signers=run.recipe.min_contributors,
        )
    return held
