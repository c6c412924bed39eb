"""Recipes: devices reach the clusters and models that sums of all means give; strategies hold no vector between rounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.relay import States, replace_models, settle
from aggregator.strategies.base import ClusterModel
from shoal.errors import IntegrityError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase
from shoal.protocol.states import StateId
from shoal.util.state_codec import encode_state
from tests.helpers.plans import Rounds, contribution, run_plan

D = 12
DEVICES = tuple(f"dev-{i}" for i in range(8))
GOALS = {
    d: (6.0 if i % 2 else -6.0) * np.eye(D)[i % 2] + np.random.default_rng(i).normal(0, 0.05, D)
    for i, d in enumerate(DEVICES)
}
ORIGINS = np.random.default_rng(99).normal(0, 0.5, (4, D)).astype(np.float32)
CASES = {
    "fedavg": ("fedavg", {}, {}),
    "sampled": ("fedavg", {}, {"participation": 0.5}),
    "local": ("local", {}, {}),
    "ifca": ("ifca", {"k": 2}, {"origins": 2}),
    "restarts": ("ifca", {"k": 2, "restarts": 2, "restart_rounds": 2}, {"origins": 4}),
    "sharing": (
        "ifca",
        {"k": 2},
        {"origins": 2, "segments": (SegmentSpec("shared", 4), SegmentSpec("cluster", D - 4))},
    ),
    "one-shot": ("one-shot", {"k": 2}, {}),
    "alg-5": ("cfl", {"form": "absolute", "eps1": 1.0, "eps2": 2.0, "validate": "off", "cool_down": 0}, {}),
    "trials": ("cfl", {"warm_up": 1, "cool_down": 0, "margin": 0.01}, {}),
    "refused": ("cfl", {"warm_up": 1, "cool_down": 0, "margin": 1e6, "refused_cool_down": 2}, {}),
    "fedgroup": ("fedgroup", {"groups": 2, "alpha": 4}, {}),
    "inter-group": ("fedgroup", {"groups": 2, "alpha": 4, "eta_g": 0.3}, {}),
    "merged": ("cfl", {"warm_up": 1, "merge_every": 2, "patience": 1}, {}),
}


class Fleet(Rounds):
    """Eight devices in two groups, each of which would like to be at its own goal: a step of length .5 leads half-way.

    With ``relayed`` devices hold the models: states that follow by recipes. Without, nothing settles the strategy, and a model
    is its origin plus the sum of its means. ``seen`` has the models that the last round has offered.
    """

    def __init__(self, case, *, relayed):
        algorithm, settings, changes = CASES[case]
        run = run_plan(algorithm, settings, **{"segments": (SegmentSpec("cluster", D),), **changes})
        super().__init__(run, DEVICES, ORIGINS[: run.origins])
        self.relayed, self.prefer_parent, self.seen = relayed, case == "merged", {}

    def settle(self):
        if self.relayed:
            super().settle()

    def answer(self, device, assignment, round_):
        thetas = {m: self.whole(self.plan, m) for m in assignment.candidates}
        self.seen |= thetas
        losses = {m: float(np.linalg.norm(GOALS[device] - theta)) for m, theta in thetas.items()}
        if self.prefer_parent and assignment.margins and round_ > 8:
            losses = {m: -loss for m, loss in losses.items()}
        model = min(losses, key=losses.get) if assignment.train else assignment.candidates[0]
        vector = (GOALS[device] - thetas[model]) * 0.5 if assignment.train else None
        margins = tuple(losses[m] - losses[model] for m in assignment.candidates) if assignment.margins else ()
        return contribution(
            device,
            vector,
            round=round_,
            model=model,
            phase=Phase(assignment.phase),
            margins=margins,
            loss=losses[model],
            model_norm=float(np.linalg.norm(thetas[model] + vector)) if assignment.norm else 0.0,
        )

    def next(self):
        """Do a round; return its outcome."""
        self.seen = {}
        return self.step(self.answer)


@pytest.mark.parametrize("case", CASES)
def test_models_are_sums_of_all_means(case):
    """Models and clusters are those of the sums of all means."""
    summed, relayed = Fleet(case, relayed=False), Fleet(case, relayed=True)
    for _ in range(14):
        assert summed.next().clusters == relayed.next().clusters
        assert not encode_state(relayed.state).arrays, "nothing masked outlives the round"
        assert summed.seen.keys() == relayed.seen.keys()
        for model, theta in summed.seen.items():
            np.testing.assert_allclose(relayed.seen[model], theta, rtol=0, atol=1e-4)
    assert [(e.round, e.kind) for e in summed.events] == [(e.round, e.kind) for e in relayed.events]


def test_only_starting_states_are_known():
    """Only states that a model starts from are known."""
    fleet = Fleet("restarts", relayed=True)
    for _ in range(10):
        fleet.next()
    used = {m.origin for m in fleet.state.slots}
    assert set(fleet.states.names) == used | set(range(4))
    assert {fleet.states[n].round for n in used} == {10}


def test_fork_of_a_moved_model_is_one_state():
    """A trial's halves begin at the model that their cluster has just reached: one mean, one state, three models."""
    moved = ClusterModel().moved(np.ones(3, np.float32), 4, 5)
    state, states, steps = settle((moved, (moved, moved)), {2: moved, 7: moved, 8: moved}, States.of_origins(1), 5)
    assert [s.state for s in steps] == [StateId(2, 5)]
    assert {m.origin for m in (state[0], *state[1])} == {1}
    assert states[1] == StateId(2, 5)
    assert steps[0].contributors == 4


def test_unmoved_model_keeps_its_state():
    """A model that did not move keeps its state."""
    still, moved = ClusterModel(origin=1), ClusterModel().moved(np.ones(3, np.float32), 4, 5)
    state, _, steps = settle({"a": still, "b": moved}, {0: moved, 1: still}, States.of_origins(2), 5)
    assert state["a"] is still
    assert [s.terms for s in steps] == [((1.0, StateId(0, 0)),)]


def test_sum_of_models_becomes_a_state():
    """The mean of two groups' models, one of which has moved this round: two terms and half of its mean."""
    one, other = ClusterModel(origin=1), ClusterModel(others=((0.5, 1),), scale=0.5).moved(np.ones(3, np.float32), 4, 5)
    _, _, steps = settle((one, other), {0: one, 4: other, 5: ClusterModel(scale=0.5)}, States.of_origins(2), 5)
    assert [s.state for s in steps] == [StateId(4, 5)]
    assert steps[0].terms == ((0.5, StateId(0, 0)), (0.5, StateId(1, 0)))


def test_nameless_moved_model_is_refused():
    """A moved model that has no name is refused."""
    moved = ClusterModel().moved(np.ones(3, np.float32), 4, 5)
    with pytest.raises(IntegrityError, match="does not name"):
        settle((moved,), {}, States.of_origins(1), 5)


def test_state_that_was_given_up_is_refused():
    with pytest.raises(IntegrityError, match="state 4"):
        States.of_origins(4)[4]


def test_models_are_found_at_every_depth():
    """Models are found at every depth and the rest is untouched."""

    @dataclasses.dataclass(frozen=True)
    class Node:
        model: ClusterModel
        name: str

    rest = ("x", {"y": 1})
    state = {"nodes": (Node(ClusterModel(origin=3), "n"), rest), "plain": rest}
    found = replace_models(state, lambda model: dataclasses.replace(model, origin=model.origin + 1))
    assert found["nodes"][0] == Node(ClusterModel(origin=4), "n")
    assert found["nodes"][1] is rest
    assert found["plain"] is rest
    assert replace_models(rest, lambda model: model) is rest
