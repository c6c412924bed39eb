"""Catching up: which steps apply, which states need a checkpoint, and which are out of step."""

import pytest

from edge_client.models.recipes import catch_up
from shoal.protocol.states import StateId
from tests.helpers.model_states import recipe, step


def ids(*pairs):
    return tuple(StateId(*pair) for pair in pairs)


def held(*pairs, digest=b"good"):
    return dict.fromkeys(ids(*pairs), digest)


def certified(*pairs):
    return held(*pairs)


def compare(states, steps, follows, *, keys=range(100), certified=None):
    """Catch up with all open states of the models in ``follows``."""
    newest = max(steps, key=lambda step: step.round, default=None)
    wanted = [id_ for id_ in (states if newest is None else newest.open) if id_.model in follows]
    return catch_up(states, steps, wanted=wanted, has_keys=keys.__contains__, certified=certified)


def train(model, round_):
    return step(round_, recipe(model, round_, (model, round_ - 1), mean=1.0))


FORK = step(7, recipe(1, 7, (0, 6), mean=1.0), recipe(2, 7, (0, 6), mean=1.0), also_open=[(0, 6)])
REFUSED = step(8, recipe(0, 8, (0, 6)))
MERGE = step(9, recipe(3, 9, (1, 8, 0.5), (2, 8, 0.5)))


def test_device_in_step_applies_last_step():
    plan = compare(held((0, 6)), [train(0, 6), train(0, 7)], {0})
    assert plan.steps == (train(0, 7),)
    assert (plan.missing, plan.out_of_step, plan.waiting) == ((), (), frozenset())
    assert plan.keep == set(ids((0, 7)))


def test_one_missed_round_applies_both_steps():
    """A device that missed one round applies both steps in order."""
    for steps in ([train(0, 6), train(0, 7)], [train(0, 7), train(0, 6)]):
        assert compare(held((0, 5)), steps, {0}).steps == (train(0, 6), train(0, 7))


def test_more_missed_rounds_take_checkpoint():
    """A device that missed more takes a checkpoint of the newest state."""
    for known in (certified((0, 7)), certified((0, 7), (0, 5))):
        plan = compare(held((0, 4)), [train(0, 6), train(0, 7)], {0}, certified=known)
        assert (plan.steps, plan.missing, plan.waiting) == ((), ids((0, 7)), frozenset())
        assert plan.keep == set(ids((0, 7)))


def test_uncertified_state_keeps_its_past():
    """Until the newest state is certified a device keeps all that may lead to it."""
    plan = compare(held((0, 4)), [train(0, 6), train(0, 7)], {0})
    assert (plan.steps, plan.missing, plan.waiting) == ((), ids((0, 7)), {6, 7})
    assert plan.keep == set(ids((0, 5), (0, 6), (0, 7)))


def test_newcomer_takes_each_checkpoint():
    """A newcomer holds nothing and takes a checkpoint of each model that it follows."""
    plan = compare({}, [train(0, 6), step(7, *train(0, 7).recipes, also_open=[(4, 2)])], {0, 4})
    assert plan.missing == ids((0, 7), (4, 2))


def test_missing_keys_take_a_checkpoint():
    """It was admitted, or came back after its chain had moved on."""
    plan = compare(held((0, 5)), [train(0, 6), train(0, 7)], {0}, keys={7, 8})
    assert (plan.steps, plan.missing) == ((), ids((0, 7)))


def test_unchanged_model_needs_nothing():
    """A model that did not change needs nothing however long a device was away."""
    plan = compare(held((5, 1)), [step(80, also_open=[(5, 1)]), step(81, also_open=[(5, 1)])], {5})
    assert (plan.steps, plan.missing, plan.keep) == ((), (), set(ids((5, 1))))


def test_before_first_step_all_states_stay():
    plan = compare(held((0, 0), (1, 0)), [], {0})
    assert (plan.steps, plan.missing, plan.keep) == ((), (), set(ids((0, 0), (1, 0))))


def test_unfollowed_recipes_are_left_out():
    """Recipes of models that are not followed are left out."""
    plan = compare(held((0, 6)), [train(0, 6), FORK], {2})
    assert [list(s.recipes) for s in plan.steps] == [[FORK.recipes[1]]]
    assert plan.keep == set(ids((2, 7), (0, 6))), "the parent is still open, and a refused trial returns to it"


def test_open_trial_keeps_the_state_before():
    """An open trial keeps the state that a refusal returns to."""
    trial = compare(held((0, 6)), [train(0, 6), FORK], {0, 1, 2})
    assert trial.keep == set(ids((0, 6), (1, 7), (2, 7)))
    back = compare(held((0, 6), (1, 7), (2, 7)), [FORK, REFUSED], {0})
    assert back.steps == (REFUSED,)
    assert back.keep == set(ids((0, 8)))


def test_refused_trial_without_the_parent():
    """A device that lacks the parent takes a checkpoint when the trial is refused."""
    plan = compare(held((1, 7)), [FORK, REFUSED], {0}, certified=certified((0, 8)))
    assert (plan.steps, plan.missing) == ((), ids((0, 8)))


def test_missed_fork_is_made_on_the_way():
    """A device that missed the fork makes its half on the way."""
    second = step(8, recipe(1, 8, (1, 7), mean=1.0), recipe(2, 8, (2, 7), mean=1.0))
    plan = compare(held((0, 6)), [FORK, second], {1})
    assert [[r.state for r in s.recipes] for s in plan.steps] == [list(ids((1, 7))), list(ids((1, 8)))]
    assert plan.keep == set(ids((1, 8)))


def test_merge_names_a_model_never_held():
    """A merge names a model never held and the device takes a checkpoint of that."""
    plan = compare(held((1, 8)), [train(1, 8), MERGE], {3}, certified=certified((1, 8), (2, 8)))
    assert (plan.steps, plan.missing) == ((), ids((2, 8)))
    assert plan.waiting == {9}, "the keys of round 9 are needed for the merged state's digest"
    assert plan.keep >= set(ids((1, 8), (2, 8), (3, 9)))
    then = compare(held((1, 8), (2, 8)), [train(1, 8), MERGE], {3}, certified=certified((1, 8), (2, 8)))
    assert (then.steps, then.missing, then.waiting, then.keep) == ((MERGE,), (), frozenset(), set(ids((3, 9))))


def test_uncertified_merge_loses_nothing():
    """A merge whose halves are not certified yet loses neither half nor keys."""
    plan = compare(held((1, 8)), [train(1, 8), MERGE], {3}, certified=certified((1, 8)))
    assert (plan.steps, plan.missing, plan.waiting) == ((), ids((3, 9)), {9})
    assert plan.keep >= set(ids((1, 8)))


def test_certified_merge_needs_a_checkpoint():
    """Once the merged state is certified its checkpoint is enough."""
    plan = compare(held((1, 8)), [MERGE], {3}, certified=certified((1, 8), (2, 8), (3, 9)))
    assert (plan.missing, plan.waiting) == (ids((3, 9)), frozenset())


def test_merge_through_two_steps_waits():
    """A merge through two steps waits with the keys of both."""
    steps = [step(8, recipe(1, 8, (1, 7), mean=1.0), recipe(2, 8, (2, 7), mean=1.0)), MERGE]
    plan = compare(held((1, 7)), steps, {3}, certified=certified((1, 7), (2, 7)))
    assert (plan.missing, plan.waiting) == (ids((2, 7)), {8, 9})
    assert plan.keep >= set(ids((1, 7), (1, 8), (2, 8), (3, 9)))


def test_another_digest_is_out_of_step():
    """A state with another digest than the certified one is out of step."""
    steps, good = [train(0, 6), train(0, 7)], certified((0, 7))
    plan = compare(held((0, 7), digest=b"bad"), steps, {0}, certified=good)
    assert (plan.steps, plan.missing, plan.out_of_step) == ((), ids((0, 7)), ids((0, 7)))


def test_state_heals_from_an_earlier_one():
    """A state out of step heals from an earlier one that is in step."""
    states = held((0, 6)) | held((0, 7), digest=b"bad")
    plan = compare(states, [train(0, 7)], {0}, certified=certified((0, 6), (0, 7)))
    assert (plan.steps, plan.missing, plan.out_of_step) == ((train(0, 7),), (), ids((0, 7)))


def test_state_out_of_step_makes_nothing():
    """Nothing is made from a state out of step."""
    plan = compare(held((0, 6), digest=b"bad"), [train(0, 6), train(0, 7)], {0}, certified=certified((0, 6)))
    assert (plan.steps, plan.out_of_step) == ((), ids((0, 6)))
    assert plan.missing == ids((0, 6)), "the certified state leads to the one that is not certified yet"


def test_uncertified_state_counts_as_in_step():
    assert compare(held((0, 6)), [train(0, 7)], {0}, certified={}).steps == (train(0, 7),)


def test_origins_out_of_step_are_missing():
    """Origins out of step are missing before the first step."""
    plan = compare(held((0, 0), digest=b"bad"), [], {0}, certified=certified((0, 0)))
    assert plan.missing == plan.out_of_step == ids((0, 0))


@pytest.mark.parametrize("terms", [2, 4000])
def test_long_recipes_take_linear_time(terms):
    """Each state is looked at once, though every recipe names it."""
    first = step(1, *(recipe(m, 1, *[(0, 0)] * 2) for m in range(200)))
    second = step(2, *(recipe(m, 2, *[(k % 200, 1) for k in range(terms)]) for m in range(10)))
    plan = compare(held((0, 0)), [first, second], set(range(10)))
    assert len(plan.steps[1].recipes) == 10
    assert len(plan.steps[0].recipes) == min(terms, 200)
