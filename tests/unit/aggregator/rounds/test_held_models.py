"""The models of a run under round keys: agreement of devices, steps, checkpoints, and the devices that can take part."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rounds.held_models import (
    Named,
    after_round,
    agree,
    offers_of,
)
from aggregator.strategies.base import ClusterModel, RoundPlan
from shoal.errors import IntegrityError
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.states import StateId, mean_number
from tests.helpers.held import NAMES, ORIGIN, TRAIN, begun, damaged, held_plan, moved, plan_of, rounds, update
from tests.helpers.plans import ROUND_KEY
from tests.helpers.statements import digest


def test_most_named_digest_is_accepted():
    """Updates from the digest that most name are accepted."""
    updates = [update(d, 1, {ORIGIN}, kinds={ORIGIN: int(d == "dev-2")}) for d in NAMES]
    found = agree(begun(), {0: ORIGIN}, updates)
    assert found.out_of_step == {"dev-2": 0}
    assert [c.device for c in found.accepted] == ["dev-1", "dev-3", "dev-4", "dev-5"]
    assert found.digests == {ORIGIN: digest(ORIGIN)}
    updates = [update("dev-1", 1, {ORIGIN}, trained=False, key_id=bytes(16)), update("dev-2", 1, {ORIGIN})]
    assert agree(begun(), {0: ORIGIN}, updates).out_of_step == {}, "without a vector the state alone is compared"
    updates = [update("dev-1", 3, {StateId(0, 2)}), update("dev-2", 3, {StateId(1, 2)})]
    assert agree(begun(), {0: StateId(0, 2)}, updates).out_of_step == {"dev-2": 0}, "its statement lacks the state"


def test_untrained_model_may_differ():
    """A device that differs in a model it did not train from is accepted but not counted as in step."""
    other = StateId(1, 0)
    updates = [update(d, 1, {ORIGIN, other}, kinds={other: int(d == "dev-2")}) for d in NAMES]
    found = agree(begun(held_plan(origins=2)), {0: ORIGIN, 1: other}, updates)
    assert found.out_of_step == {}
    assert [d for d in NAMES if not found.agrees(d)] == ["dev-2"]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_agreement_ignores_the_order(kinds, random):
    """Agreement does not depend on the order of uploads."""
    updates = [update(d, 1, {ORIGIN}, kinds={ORIGIN: k}) for d, k in zip(NAMES, kinds, strict=False)]
    shuffled = random.sample(updates, len(updates))
    one, other = (agree(begun(), {0: ORIGIN}, found) for found in (updates, shuffled))
    assert one.out_of_step == other.out_of_step
    most = max(kinds.count(k) for k in kinds)
    assert len(one.accepted) == most


def test_several_origins_stay_open():
    """Origins stay open if the algorithm takes several; those of an earlier run only while a model is at them."""
    several = held_plan(origins=2, algorithm="ifca", settings={"k": "2"})
    for run, open_ in ((several, (ORIGIN, StateId(0, 1), StateId(1, 0))), (held_plan(origins=2), (StateId(0, 1),))):
        held = moved(begun(run), 1, [update(d, 1, {ORIGIN, StateId(1, 0)}, run=run) for d in NAMES], run=run)
        assert held.steps[-1].step.open == open_


def test_checkpoint_goes_with_its_devices():
    """A checkpoint of a device that left or with its statements is announced no more."""
    held = rounds(1, devices=("dev-1", "dev-2"), seal=lambda _: "dev-1")
    assert (list(held.announced(2)), held.only(("dev-2", "dev-3")).announced(2)) == ([0], {})
    assert held.only(("dev-1", "dev-3")).announced(2) == {}


def test_offers_are_states_of_planned_models():
    held = rounds(2)
    assert offers_of(plan_of(held), held.states) == {0: StateId(0, 2)}
    shared = dataclasses.replace(plan_of(held), shared=ClusterModel(0))
    assert offers_of(shared, held.states) == {0: StateId(0, 2), SHARED_MODEL: ORIGIN}


@pytest.mark.parametrize("model", [ClusterModel(scale=0.5), ClusterModel(others=((1.0, 0),)), ClusterModel(origin=9)])
def test_offered_model_is_at_a_held_state(model):
    """An offered model is at a state that devices hold."""
    with pytest.raises(IntegrityError):
        offers_of(RoundPlan(1, {0: model}, {"dev-1": TRAIN}), begun().states)


def test_differing_compared_model_counts():
    """A device that differs in a model to compare with is out of step."""
    other = StateId(1, 0)
    updates = [update(d, 1, {ORIGIN, other}, kinds={other: int(d == "dev-2")}) for d in NAMES[:4]]
    updates.append(update("dev-5", 1, {ORIGIN}))
    comparing = dict.fromkeys(NAMES, dataclasses.replace(TRAIN, compare=(0, 1)))
    found = agree(begun(held_plan(origins=2)), {0: ORIGIN, 1: other}, updates, comparing)
    assert found.out_of_step == {"dev-2": 0, "dev-5": 0}


def test_commonest_key_wins_then_the_smaller():
    """The key that most updates have wins and of two the smaller."""
    keys = {"dev-1": b"b" * 16, "dev-2": b"a" * 16}
    two = [update(d, 1, {ORIGIN}, key_id=k) for d, k in keys.items()]
    assert agree(begun(), {0: ORIGIN}, two).out_of_step == {"dev-1": 0}
    assert agree(begun(), {0: ORIGIN}, [*two, update("dev-3", 1, {ORIGIN}, key_id=b"b" * 16)]).out_of_step == {
        "dev-2": 0
    }


def test_certified_digest_wins_then_smaller():
    """Model 0 stays at its origin for a round, so statements of the round before name it too."""
    tie = [update("dev-1", 2, {ORIGIN}), update("dev-2", 2, {ORIGIN}, kinds={ORIGIN: 1})]
    assert agree(begun(), {0: ORIGIN}, tie).out_of_step == {"dev-2": 0}
    before = [update(d, 1, {ORIGIN}, kinds={ORIGIN: 1}) for d in ("dev-3", "dev-4")]
    held = after_round(
        begun(),
        1,
        run=held_plan(),
        offers={0: ORIGIN},
        agreement=agree(begun(), {0: ORIGIN}, before),
        given=before,
        declined={},
        settled=(begun().states, (), frozenset({0})),
        signers=held_plan().recipe.min_contributors,
    )
    assert agree(held, {0: ORIGIN}, tie).out_of_step == {"dev-1": 0}


def test_last_two_steps_keep_their_means():
    """The last two steps stay with their masked means."""
    held = rounds(3)
    assert [kept.step.round for kept in held.steps] == [2, 3]
    (mean,) = held.steps[-1].means
    assert (mean.model, mean.contributors, mean.key_id, mean.vector[0]) == (0, 5, ROUND_KEY, 3.0)
    assert held.steps[-1].step.open == (StateId(0, 3),)
    (recipe,) = held.steps[-1].step.recipes
    assert (recipe.terms[0].state, recipe.mean) == (StateId(0, 2), 1.0)


def test_checkpoint_is_announced_once_signed():
    """A checkpoint is announced once enough devices have signed its state."""
    held = rounds(1, devices=("dev-1",), seal=lambda _: "dev-1")
    assert (held.certified, list(held.pending), held.announced(2)) == ({}, [0], {})
    held = rounds(1, held=held, devices=("dev-1", "dev-2"), seal=lambda _: "dev-2")
    (checkpoint,) = held.announced(2).values()
    assert (checkpoint.state, checkpoint.round, checkpoint.device) == (StateId(0, 1), 2, "dev-2")
    assert held.pending == {}
    assert len(held.statements([checkpoint.state])) == 2


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 500])
def test_malformed_attachment_is_ignored(damage):
    """A malformed attachment is ignored and the update counts."""
    good = update("dev-1", 1, {ORIGIN}, seals=((0, ORIGIN),))
    bad = dataclasses.replace(good, attached=good.attached[: len(good.attached) // 2] + damage)
    held = moved(begun(), 1, [bad, update("dev-2", 1, {ORIGIN})])
    assert (held.certified, held.pending, held.named["dev-1"].round) == ({}, {}, 1)


def test_other_states_checkpoint_is_ignored():
    """A checkpoint of another state round or device is ignored."""
    for wrong in (((0, StateId(0, 5)),), ((7, ORIGIN),)):
        held = moved(begun(), 1, [update("dev-1", 1, {ORIGIN}, seals=wrong), update("dev-2", 1, {ORIGIN})])
        assert (held.certified, held.pending) == ({}, {})


def test_retained_steps_tell_what_is_held():
    """A device holds what follows from its last statement by the retained steps."""
    held = rounds(1)
    held = rounds(2, held=held, devices=("dev-1", "dev-2"))
    assert StateId(0, 3) not in held.held_by("dev-3")
    assert StateId(0, 3) in held.held_by("dev-1")
    assert [held.is_current(d) for d in ("dev-1", "dev-3")] == [True, False]
    assert StateId(0, 3) in rounds(1, devices=("dev-1",), held=rounds(2, devices=("dev-1", "dev-3"))).held_by("dev-3")


def test_unmoved_round_retains_earlier_steps():
    """A round that moves no model retains the steps before it."""
    held = rounds(2)
    still = after_round(
        held,
        3,
        run=held_plan(),
        offers={0: StateId(0, 2)},
        agreement=agree(held, {0: StateId(0, 2)}, []),
        given=[],
        declined={},
        settled=(held.states, (), frozenset(held.states.names)),
        signers=held_plan().recipe.min_contributors,
    )
    assert [kept.step.round for kept in still.steps] == [1, 2]
    assert still.closed == 3
    # The means of rounds 2 and 4 would share a label.
    states = {4: StateId(0, 2)}
    updates = [update(d, 4, {states[4]}) for d in NAMES]
    assert [kept.step.round for kept in moved(still, 4, updates).steps] == [4]


TWO = held_plan(origins=2, max_models=2, min_contributors=2)


def one_stands_still(count, held=None):
    """Return the models after two rounds in which both models moved, and ``count`` in which only model 0 did."""
    held = held or two_move(begun(TWO), 2)
    for round_ in range(held.closed + 1, held.closed + 1 + count):
        updates = [update(d, round_, {StateId(0, round_ - 1)}, run=TWO) for d in NAMES[:3]]
        held = moved(held, round_, updates, run=TWO)
    return held


def two_move(held, count):
    for round_ in range(held.closed + 1, held.closed + 1 + count):
        updates = [update(d, round_, {StateId(0, round_ - 1)}, run=TWO) for d in NAMES[:3]]
        updates += [update(d, round_, {StateId(1, round_ - 1)}, model=1, run=TWO) for d in NAMES[3:]]
        held = moved(held, round_, updates, run=TWO, models=(0, 1))
    return held


def test_model_that_goes_on_drops_recipes():
    """A model that goes on drops the recipes from before it stood still."""
    held = one_stands_still(5)
    states = {0: StateId(0, held.closed), 1: StateId(1, 2)}
    updates = [update(d, 8, {states[0]}, run=TWO) for d in NAMES[:3]]
    updates += [update(d, 8, {states[1]}, model=1, run=TWO) for d in NAMES[3:]]
    held = moved(held, 8, updates, run=TWO, models=(0, 1))
    # The mean of round 2 would have the topic label of that of round 8, and without it that of round 1 is of no use.
    assert [(r.model, r.round) for kept in held.steps for r in kept.step.recipes] == [(0, 7), (0, 8), (1, 8)]


def test_small_cluster_keeps_certified_state():
    """Devices of a small cluster keep its last certified state."""
    assert damaged(0).steps[-1].step.open == (StateId(0, 2), StateId(0, 3))
    run = held_plan(min_contributors=2)
    many = rounds(3, devices=NAMES, held=begun(run), run=run, seal=lambda r: "dev-1" if r == 3 else None)
    assert many.steps[-1].step.open == (StateId(0, 3),)


def test_earlier_keys_are_erased():
    """A device has erased the keys of the steps before its last round."""
    held = rounds(2)
    assert dataclasses.replace(held, named={"dev-1": Named(2, (ORIGIN,))}).held_by("dev-1") == {ORIGIN}
    assert StateId(0, 2) in dataclasses.replace(held, named={"dev-1": Named(1, (ORIGIN,))}).held_by("dev-1")


def test_gone_models_lose_checkpoints():
    """Such as those of the halves of a refused split: each would be announced until the end of the run."""
    held = rounds(2, seal=lambda r: f"dev-{r}")
    checkpoint, gone = held.certified[0], StateId(7, 1)
    others = {7: dataclasses.replace(checkpoint, state=gone), 8: dataclasses.replace(checkpoint, state=StateId(0, 2))}
    held = dataclasses.replace(held, certified={0: checkpoint, **others}, pending={7: others[7]})
    after = rounds(1, held=held)
    assert set(after.certified) == {0, 8}, "a step that is still announced begins at the state of model 8"
    assert after.pending == {}


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_recipes_of_a_standing_model_stay(count):
    """The recipes that led to a model which stands still stay."""
    held = one_stands_still(count)
    found = [(r.model, r.round) for kept in held.steps for r in kept.step.recipes]
    assert sorted(found) == [(0, held.closed - 1), (0, held.closed), (1, 1), (1, 2)]
    for kept in held.steps:
        assert [m.model for m in kept.means] == [r.model for r in kept.step.recipes]
        assert bool(kept.step.open) == (kept is held.steps[-1])
    assert StateId(1, 2) in held.held_by("dev-4")


@pytest.mark.slow
@given(st.lists(st.sets(st.integers(0, 3)), max_size=20))
def test_at_most_two_recipes_a_model_stay(script):
    """At most two recipes of each model stay under labels of their own."""
    run = held_plan(origins=4, max_models=4)
    held = begun(run)
    for round_, models in enumerate(script, start=1):
        held = moved(held, round_, [], run=run, models=tuple(sorted(models))) if models else held
    recipes = [recipe for kept in held.steps for recipe in kept.step.recipes]
    labels = [mean_number(recipe.model, recipe.round) for recipe in recipes]
    assert len(set(labels)) == len(labels)
    reached = held.reach(StateId(m, 0) for m in range(4))
    assert all(kept.step.recipes for kept in held.steps[:-1])
    for model in range(4):
        last = max((round_ for round_, models in enumerate(script, start=1) if model in models), default=0)
        assert any(r.state == StateId(model, last) for r in recipes) or not last or StateId(model, last) in reached
