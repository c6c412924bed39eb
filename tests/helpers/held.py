"""Models under round keys, statements, checkpoints and updates made by hand, for tests of the engine without a network."""

import dataclasses

import numpy as np

from aggregator.rounds.held_models import HeldModels, after_round, agree
from aggregator.rounds.relay import RelayedStep, States
from aggregator.strategies.base import ClientUpdate
from crypto.seal.envelope import GroupKey, seal_to_group
from crypto.seal.identity import Identity
from shoal.membership.statements import sign_statement
from shoal.protocol.codec import encode
from shoal.protocol.messages import Phase, Sealed
from shoal.protocol.states import HeldState, SealedCheckpoints, StateId, Statement, checkpoint_purpose
from tests.helpers.plans import run_plan

NAMES = ("dev-1", "dev-2", "dev-3", "dev-4", "dev-5")
IDENTITIES = {name: Identity.generate(name) for name in NAMES}
ROUND_KEY = b"K" * 16
CONTENT = GroupKey("demo", "content", bytes(32))


def held_plan(**changes):
    """Return a plan under round keys."""
    return run_plan(
        **{"keys": "round", "key_version": 3, "key_id": bytes(16), "epoch": 0, "min_contributors": 2} | changes
    )


def digest(state, kind=0):
    """Return a digest of a state; another ``kind`` is that of other bits."""
    return bytes([kind, state.model % 256]) + state.round.to_bytes(30, "big")


def update(device, round_, states, *, model=0, run=None, seals=(), kinds=None, key_id=ROUND_KEY, trained=True):
    """Return an update whose statement names ``states``, with checkpoints of ``seals``, pairs (model, state)."""
    run = run or held_plan()
    named = tuple(HeldState(s.model, s.round, digest(s, (kinds or {}).get(s, 0))) for s in sorted(states))
    statement = sign_statement(IDENTITIES[device], Statement(run.fleet, run.run_id, round_, device, named))
    attached = b""
    if seals:
        envelopes = []
        for _, state in seals:
            head = Sealed(run.fleet, checkpoint_purpose(run.run_id, round_, state), device, "*")
            envelopes.append(seal_to_group(IDENTITIES[device], CONTENT, head, b"state"))
        sealed = SealedCheckpoints(tuple(m for m, _ in seals), tuple(len(e) for e in envelopes))
        attached = encode(sealed) + b"".join(envelopes)
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
    used = frozenset(n for n, s in names.items() if s.round == round_)
    return after_round(
        held,
        round_,
        run=run,
        offers=offers,
        agreement=agreement,
        given=updates,
        declined=declined or {},
        settled=(States(names, number), tuple(steps), used),
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
