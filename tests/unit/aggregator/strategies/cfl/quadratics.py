"""Devices whose loss is the distance to their group's goal, for tests of CFL that need no training."""

import dataclasses
import random

import numpy as np

from edge_client.learning.scoring import nearest_direction
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase, Share
from tests.helpers.plans import Rounds, contribution, run_plan

D = 24
RNG = np.random.default_rng(11)
GROUPS = {  # ids that are neither contiguous nor in order of their groups
    "a": ("dev-90", "dev-07", "dev-33"),
    "b": ("dev-02", "dev-71", "dev-40"),
    "c": ("dev-55", "dev-11", "dev-68"),
    "d": ("dev-04", "dev-82", "dev-29"),
}
GROUP_OF = {device: g for g, members in GROUPS.items() for device in members}
DEVICES = tuple(random.Random(1).sample(sorted(GROUP_OF), len(GROUP_OF)))
GOAL = {"a": 8.0 * np.eye(D)[0], "b": 4.0 * np.eye(D)[1], "c": 2.0 * np.eye(D)[2], "d": -2.0 * np.eye(D)[2]}
NOISE = {d: 0.02 * RNG.standard_normal(D) for d in DEVICES}
ALG_5 = {"form": "absolute", "eps1": 0.05, "eps2": 0.5, "validate": "off", "cool_down": 0}
TRIED = {"eps1": 0.4, "warm_up": 1, "cool_down": 0, "refused_cool_down": 3, "p_value": 0.05, "margin": 0.01}


def settled_tree(**settings):
    """Return rounds in which Alg. 5 has cut the four groups apart: three nested splits."""
    rounds = cfl(**{**ALG_5, **settings})
    rounds.go(Quadratic(rounds), 12)
    return rounds


def cfl(devices=DEVICES, changes=None, **settings):
    run = run_plan("cfl", settings, segments=(SegmentSpec("cluster", D),), **{"rounds": 200, **(changes or {})})
    return Rounds(run, devices)


def ran(rounds, kind=None, devices=DEVICES, changes=None, **settings):
    """Return a fleet after so many rounds, and the answers of its devices."""
    fleet = cfl(devices, changes, **settings)
    answer = (kind or Quadratic)(fleet)
    for _ in range(rounds):
        fleet.step(answer)
    return fleet, answer


class Quadratic:
    """Devices that would each like to be at their group's goal: one gradient step of length one leads there."""

    def __init__(self, rounds, goals=None):
        self.rounds = rounds
        self.goals = goals or {d: GOAL[g] for d, g in GROUP_OF.items()}
        self.assignments = []

    def theta(self, model):
        return self.rounds.theta(dict(slots(self.rounds.state))[model])

    def loss(self, device, model):
        return float(np.linalg.norm(self.goals[device] - self.theta(model)))

    def __call__(self, device, assignment, round_):
        self.assignments.append((round_, device, assignment))
        model, margins, vector = assignment.candidates[0], (), None
        nearest = 0
        if assignment.phase == Phase.PLACE:
            thetas = {m: self.rounds.theta(self.rounds.plan.models[m]) for m in assignment.models}
            delta = (self.goals[device] + NOISE.get(device, 0.0) - thetas[model]).astype(np.float32)
            nearest = nearest_direction(model, delta, assignment.compare, thetas)
        if assignment.train:
            model = min(assignment.scored, key=lambda m: self.loss(device, m))
            vector = self.goals[device] + NOISE.get(device, 0.0) - self.theta(model)
        if assignment.margins:
            margins = tuple(self.loss(device, m) - self.loss(device, model) for m in assignment.candidates)
            assert assignment.share == Share.VALIDATION
        phase = Phase(assignment.phase)
        return contribution(device, vector, round=round_, model=model, phase=phase, margins=margins, nearest=nearest)


class Telling(Quadratic):
    """Devices that report the margins of `told` in place of their own."""

    def __call__(self, device, assignment, round_):
        given = super().__call__(device, assignment, round_)
        if not assignment.margins:
            return given
        return dataclasses.replace(given, margins=self.told(device, given.margins, round_))


def slots(state):
    yield from ((c.id, c.slot) for c in state.clusters.values())
    yield from ((h.model, h.slot) for t in state.trials.values() for h in (t.left, t.right))
    yield from ((n.id, n.slot) for n in state.tree.values())


def partition(rounds):
    return {frozenset(c.members) for c in rounds.state.clusters.values()}


def everybody(state):
    """Return every device in a cluster or on its way to one, in order; twice if it is in two."""
    return sorted([d for c in state.clusters.values() for d in c.members] + list(state.unplaced))


TRUTH = {frozenset(members) for members in GROUPS.values()}
