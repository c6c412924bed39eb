"""Parties of a run with a keeper, and what devices seal to it."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from aggregator.keeper.answer import answered
from aggregator.keeper.memory import KeeperMemory
from aggregator.looks import Looks
from aggregator.strategies.base import ClientUpdate
from aggregator.sums import KeeperAwaitedError
from crypto.seal.envelope import seal_to_member
from crypto.seal.identity import Identity
from crypto.sums.deals import deal
from crypto.sums.looks import hidden_sketch
from shoal.protocol.cells import LookDeal, deal_head
from shoal.protocol.codec import encode
from shoal.protocol.documents import Roster
from shoal.protocol.messages import Phase
from shoal.protocol.sums import Figures, KeeperShare, share_head
from tests.helpers.plans import D, run_plan

NONCE = b"n" * 16
NAMES = tuple(f"dev-{at}" for at in range(12))
FIGURES = Figures(loss=1.0, norm=2.0)
MOST = 64


@functools.cache
def identity(name):
    return Identity.generate(name)


@functools.cache
def plan_of(run=1, algorithm="fedavg", **changes):
    keeper = {"keeper": identity("keeper").member, "most_summed": MOST}
    chosen = {"mode": "rotation", "weighting": "uniform", "min_contributors": 3}
    return run_plan(algorithm, run=run, run_id=bytes([run]) * 16, **keeper, **chosen, **changes)


def roster_of(revoked=()):
    devices = tuple(identity(name).member for name in NAMES)
    return Roster(
        fleet="demo", sequence=3, issued_at_s=0, expires_at_s=1 << 40, aggregator=None, devices=devices, revoked=revoked
    )


def seed_of(name):
    return (name.encode() * 32)[:32]


def share(name, *, run=1, round_=1, model=0, signer=None, pad=None, figures=FIGURES, **changes):
    """Return a device's sealed share; ``changes`` are fields of it."""
    plan = plan_of(run)
    told = KeeperShare(
        fleet="demo",
        run_id=plan.run_id,
        round=round_,
        phase=Phase.TRAIN,
        nonce=NONCE,
        device=name,
        recipient=plan.keeper.seal_key,
        model=model,
        length=D,
        pad=seed_of(name) if pad is None else pad,
        figures=figures,
    )
    told = dataclasses.replace(told, **changes)
    head = share_head("demo", name, "keeper")
    return seal_to_member(identity(signer or name), plan.keeper.seal_key, head, encode(told))


AGGREGATOR_SEED, KEEPER_SEED = b"A" * 32, b"K" * 32
LOOKS = 3


@functools.cache
def deals_of(plan, owner="owner", looks=LOOKS):
    """Return the owner's numbers for looks: the aggregator's seed, then those of the keeper, sealed."""

    def sealed(member, index, seed, dealt=b""):
        told = LookDeal(run_id=plan.task_run[1], index=index, seed=seed, share=dealt)
        return seal_to_member(identity(owner), member.seal_key, deal_head("demo", "owner", member.name), encode(told))

    shares = [deal(AGGREGATOR_SEED, KEEPER_SEED, index=i)[1].share.astype("<u4").tobytes() for i in range(looks)]
    keeper = (sealed(plan.keeper, i, KEEPER_SEED, dealt) for i, dealt in enumerate(shares))
    return (sealed(identity("aggregator").member, 0, AGGREGATOR_SEED), *keeper)


def look_plan():
    """Return a plan of CFL with looks."""
    return plan_of(1, "cfl", looks=LOOKS)


def looks_of(plan, directory, ask):
    """Return an aggregator's looks."""
    deals = deals_of(plan)[1:]
    return Looks(plan, signed=b"plan", seed=AGGREGATOR_SEED, deals=deals, directory=directory, ask=ask)


GROUPS = {name: at % 2 for at, name in enumerate(NAMES)}


def vector_of(name):
    """Return an update of one of two groups."""
    centre = np.where(np.arange(D) % 2 == GROUPS[name], 1.0, -0.2)
    return (centre + 0.02 * np.arange(D) * (1 + NAMES.index(name))).astype(np.float32)


def looked_update(name, round_=1, phase=Phase.TRAIN, model=0, figures=None, sketch=None):
    norm = float(np.linalg.norm(vector_of(name)))
    sealed = share(name, round_=round_, phase=phase, model=model, figures=figures or Figures(norm=norm))
    words = hidden_sketch(vector_of(name) if sketch is None else sketch, seed_of(name))
    return ClientUpdate(
        round=round_,
        phase=phase,
        device=name,
        model=model,
        samples=1,
        loss=0.0,
        key_id=bytes(16),
        share=sealed,
        sketch=words.astype("<u4").tobytes(),
    )


class LookScene:
    """An aggregator that looks, and a keeper that answers at once, or one request late."""

    def __init__(self, directory, plan, *, late=False):
        self.plan, self.directory, self.late = plan, directory, late
        self.memory, self.requests, self.answers = KeeperMemory(), [], {}
        self.deals = deals_of(plan)
        self.looks = self.restarted()

    def restarted(self):
        self.looks = looks_of(self.plan, self.directory, self.ask)
        return self.looks

    def ask(self, request):
        if request not in self.answers:
            self.answers[request] = self.told(request)
            if self.late:
                raise KeeperAwaitedError("not yet")
        return self.answers[request]

    def told(self, request, **options):
        """Return the keeper's answer, and take over its memory."""
        parties = {
            "roster": roster_of(),
            "identity": identity("keeper"),
            "owner_key": identity("owner").member.sign_key,
        }
        found = answered(request, self.plan, memory=self.memory, **{**parties, **options})
        self.requests.append(request)
        self.memory = found.memory
        assert not list(found.pads()), "a look opens nothing"
        return found.message

    def at(self, names=NAMES, round_=1, **options):
        given = [looked_update(name, round_, **options) for name in names]
        for _ in range(6):
            try:
                self.looks.begin(round_, NONCE)
                return self.looks.at(given)
            except KeeperAwaitedError:
                self.restarted()
        raise AssertionError("no end")
