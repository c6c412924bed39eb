"""CFL with everything that can happen at once: no device is lost, no leaf dies of a move, a restart changes nothing."""

import json
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.strategies.base import in_order
from aggregator.strategies.cfl import tree as cfl_tree
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase
from shoal.util.state_codec import decode_state, encode_state
from tests.helpers.plans import Rounds, contribution, run_plan
from tests.properties.states import same

D, ROUNDS = 6, 30


def anything(rng):
    """Return a plan with settings that make splits, trials, merges and moves frequent."""
    validate = rng.random() < 0.6
    chosen = {
        "validate": "on" if validate else "off",
        "look_every": rng.choice([2, 3, 5]),
        "merge_every": rng.choice([0, 2, 3]),
        "min_side": rng.choice([1, 2, 3]),
        "patience": rng.choice([1, 2]),
        "eps1": 0.95,
        "cool_down": rng.choice([0, 2]),
        "refused_cool_down": rng.choice([0, 1]),
        "margin": rng.choice([-5.0, 0.0]),
        "p_value": 1.0,
        "prefer": rng.choice([0.0, 0.3]),
        "merge_p_value": rng.choice([0.3, 1.0]),
        "trial_rounds": rng.choice([1, 2]),
        "max_age": rng.choice([1, 5, 20]),
    }
    fields = {"min_contributors": rng.choice([1, 1, 2, 3]), "participation": rng.choice([1.0, 1.0, 0.6])}
    return run_plan("cfl", chosen, segments=(SegmentSpec("cluster", D),), rounds=ROUNDS, **fields)


class World:
    """Devices with goals that change, of which some come late and some stay away."""

    def __init__(self, seed):
        self.rng, self.noise = random.Random(seed), np.random.default_rng(seed)
        self.plan = anything(self.rng)
        self.goals = {f"d{i:02d}": self.goal() for i in range(self.rng.randint(4, 14))}

    def goal(self):
        return self.noise.normal(size=D) * 3

    def turn(self):
        """Let something happen; return who is there."""
        if self.rng.random() < 0.15:
            self.goals[f"n{len(self.goals):02d}"] = self.goal()
        if self.rng.random() < 0.3:
            self.goals[self.rng.choice(sorted(self.goals))] = self.goal()
        return tuple(sorted(d for d in self.goals if self.rng.random() < 0.85)) or ("d00",)

    def answer(self, plan, device, order):
        thetas = {m: self.rounds.theta(plan.models[m]) for m in order.candidates}
        loss = {m: float(np.linalg.norm(self.goals[device] - t)) + 3 * self.rng.random() for m, t in thetas.items()}
        model, vector, margins = order.candidates[0], None, ()
        if order.train:
            model = min(order.candidates, key=loss.get)
            vector = 0.5 * (self.goals[device] - thetas[model]) + 0.3 * self.noise.normal(size=D)
        if order.margins:
            margins = tuple(loss[m] - loss[model] for m in order.candidates)
        nearest = self.rng.choice(order.compare) if order.compare else 0
        phase = Phase(order.phase)
        return contribution(
            device, vector, round=plan.round, model=model, phase=phase, margins=margins, nearest=nearest
        )


def places(state):
    return sorted([d for c in state.clusters.values() for d in c.members] + list(state.unplaced))


def alive(state, given, after):
    """Return leaf -> how many of its devices answer or have done so since round ``after``."""
    heard = {d for d, r in state.heard.items() if r >= after} | {c.device for c in given}
    return {c.id: len(heard.intersection(c.members)) for c in state.clusters.values()}


@settings(max_examples=settings.default.max_examples // 16)
@given(st.integers(0, 2**32))
def test_anything_may_happen(seed):
    world = World(seed)
    rounds = world.rounds = Rounds(world.plan, sorted(world.goals))
    strategy, state = rounds.strategy, rounds.state
    for round_ in range(1, ROUNDS + 1):
        there = world.turn()
        encoded = encode_state(state)
        document = json.loads(json.dumps(encoded.document))
        again = decode_state(strategy.state_type, document, encoded.arrays)
        assert same(again, state)
        before, plan = strategy.plan(state, round_, there)
        twin, repeated = strategy.plan(again, round_, there)
        assert same(dict(plan.assignments), dict(repeated.assignments))
        assert all(set(o.candidates) <= plan.models.keys() for o in plan.assignments.values())
        given_ = in_order(world.answer(plan, d, o) for d, o in plan.assignments.items() if world.rng.random() < 0.9)
        ends = []
        for start in (before, twin):
            ends.append(strategy.close(start, plan, in_order(world.rng.sample(given_, len(given_)))))
        (state, outcome), (other, _) = ends
        assert same(other, state)
        rounds.round, rounds.state = round_, state
        rounds.settle()
        state = rounds.state
        assert places(state) == places(before)
        assert len(set(places(state))) == len(places(state))
        below = cfl_tree.leaves(state.tree, 0) if state.tree else (0,)
        assert set(below) == state.clusters.keys()
        moved = [e for e in outcome.events if e.kind == "moved"]
        if moved and not [e for e in outcome.events if e.kind in ("split", "merge", "newcomer")]:
            after = round_ - strategy.settings.max_age
            then, now = alive(before, given_, after), alive(state, given_, after)
            died = [leaf for leaf in then if then[leaf] >= strategy.least_side and 0 < now[leaf] < strategy.least_side]
            assert not died
