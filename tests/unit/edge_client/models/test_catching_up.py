"""Catching up: which steps apply, which states need a checkpoint, and which are out of step."""

import pytest

from edge_client.models.recipes import catch_up
from shoal.protocol.states import StateId
from tests.helpers.model_states import recipe, step


def ids(*pairs):
    return tuple(StateId(*pair) for pair in pairs)


def held(*pairs, digest=b"good"):
    return dict.fromkeys(ids(*pairs), digest)


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


LAST_TWO = [train(0, 6), train(0, 7)]
HALVES = step(8, recipe(1, 8, (1, 7), mean=1.0), recipe(2, 8, (2, 7), mean=1.0))
OPEN_FOUR = [train(0, 6), step(7, *train(0, 7).recipes, also_open=[(4, 2)])]
IDLE = [step(80, also_open=[(5, 1)]), step(81, also_open=[(5, 1)])]


def plans(*, steps=(), missing=(), out_of_step=(), waiting=(), keep=None):
    """Return what a plan is to be; ``keep`` None: whatever it keeps."""
    wanted = {"steps": tuple(steps), "missing": ids(*missing), "out_of_step": ids(*out_of_step)}
    return wanted | {"waiting": frozenset(waiting)} | ({} if keep is None else {"keep": set(ids(*keep))})


@pytest.mark.parametrize(
    ("states", "steps", "follows", "given", "expected"),
    [
        pytest.param(
            held((0, 6)), LAST_TWO, {0}, {}, plans(steps=[train(0, 7)], keep=[(0, 7)]), id="in step: the last step"
        ),
        *(
            pytest.param(
                held((0, 4)),
                LAST_TWO,
                {0},
                {"certified": known},
                plans(missing=[(0, 7)], keep=[(0, 7)]),
                id="missed more",
            )
            for known in (held((0, 7)), held((0, 7), (0, 5)))
        ),
        pytest.param(
            held((0, 4)),
            LAST_TWO,
            {0},
            {},
            plans(missing=[(0, 7)], waiting=[6, 7], keep=[(0, 5), (0, 6), (0, 7)]),
            id="until the newest state is certified all that may lead to it is kept",
        ),
        pytest.param({}, OPEN_FOUR, {0, 4}, {}, plans(missing=[(0, 7), (4, 2)], waiting=[6, 7]), id="newcomer"),
        # It was admitted, or came back after its chain had moved on.
        pytest.param(
            held((0, 5)), LAST_TWO, {0}, {"keys": {7, 8}}, plans(missing=[(0, 7)], waiting=[7]), id="without keys"
        ),
        pytest.param(held((5, 1)), IDLE, {5}, {}, plans(keep=[(5, 1)]), id="unchanged however long it was away"),
        pytest.param(
            held((0, 0), (1, 0)), [], {0}, {}, plans(keep=[(0, 0), (1, 0)]), id="before the first step all stay"
        ),
        pytest.param(
            held((1, 7)),
            [FORK, REFUSED],
            {0},
            {"certified": held((0, 8))},
            plans(missing=[(0, 8)]),
            id="a refused trial whose parent it lacks",
        ),
        # The keys of round 9 are needed for the merged state's digest.
        pytest.param(
            held((1, 8)),
            [train(1, 8), MERGE],
            {3},
            {"certified": held((1, 8), (2, 8))},
            plans(missing=[(2, 8)], waiting=[9], keep=[(1, 8), (2, 8), (3, 9)]),
            id="a merge of a model never held",
        ),
        pytest.param(
            held((1, 8), (2, 8)),
            [train(1, 8), MERGE],
            {3},
            {"certified": held((1, 8), (2, 8))},
            plans(steps=[MERGE], keep=[(3, 9)]),
            id="a merge of both halves",
        ),
        pytest.param(
            held((1, 8)),
            [train(1, 8), MERGE],
            {3},
            {"certified": held((1, 8))},
            plans(missing=[(3, 9)], waiting=[9], keep=[(1, 8), (2, 8), (3, 9)]),
            id="an uncertified merge loses neither half nor keys",
        ),
        pytest.param(
            held((1, 8)),
            [MERGE],
            {3},
            {"certified": held((1, 8), (2, 8), (3, 9))},
            plans(missing=[(3, 9)]),
            id="a certified merge needs its checkpoint only",
        ),
        pytest.param(
            held((1, 7)),
            [HALVES, MERGE],
            {3},
            {"certified": held((1, 7), (2, 7))},
            plans(missing=[(2, 7)], waiting=[8, 9], keep=[(1, 7), (1, 8), (2, 7), (2, 8), (3, 9)]),
            id="a merge through two steps waits with the keys of both",
        ),
        pytest.param(
            held((0, 7), digest=b"bad"),
            LAST_TWO,
            {0},
            {"certified": held((0, 7))},
            plans(missing=[(0, 7)], out_of_step=[(0, 7)]),
            id="another digest",
        ),
        pytest.param(
            held((0, 6)) | held((0, 7), digest=b"bad"),
            [train(0, 7)],
            {0},
            {"certified": held((0, 6), (0, 7))},
            plans(steps=[train(0, 7)], out_of_step=[(0, 7)]),
            id="another digest heals from an earlier state",
        ),
        # The certified state leads to the one that is not certified yet.
        pytest.param(
            held((0, 6), digest=b"bad"),
            LAST_TWO,
            {0},
            {"certified": held((0, 6))},
            plans(missing=[(0, 6)], out_of_step=[(0, 6)], waiting=[7]),
            id="nothing is made from another digest",
        ),
        pytest.param(
            held((0, 6)), [train(0, 7)], {0}, {"certified": {}}, plans(steps=[train(0, 7)]), id="uncertified: in step"
        ),
        pytest.param(
            held((0, 0), digest=b"bad"),
            [],
            {0},
            {"certified": held((0, 0))},
            plans(missing=[(0, 0)], out_of_step=[(0, 0)]),
            id="origins out of step are missing before the first step",
        ),
    ],
)
def test_plan_of_a_device(states, steps, follows, given, expected):
    plan = compare(states, steps, follows, **given)
    assert {name: getattr(plan, name) for name in expected} == expected


def test_one_missed_round_applies_both_steps():
    """A device that missed one round applies both steps in order."""
    for steps in ([train(0, 6), train(0, 7)], [train(0, 7), train(0, 6)]):
        assert compare(held((0, 5)), steps, {0}).steps == (train(0, 6), train(0, 7))


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


def test_missed_fork_is_made_on_the_way():
    """A device that missed the fork makes its half on the way."""
    plan = compare(held((0, 6)), [FORK, HALVES], {1})
    assert [[r.state for r in s.recipes] for s in plan.steps] == [list(ids((1, 7))), list(ids((1, 8)))]
    assert plan.keep == set(ids((1, 8)))


@pytest.mark.parametrize("terms", [2, 4000])
def test_long_recipes_take_linear_time(terms):
    """Each state is looked at once, though every recipe names it."""
    first = step(1, *(recipe(m, 1, *[(0, 0)] * 2) for m in range(200)))
    second = step(2, *(recipe(m, 2, *[(k % 200, 1) for k in range(terms)]) for m in range(10)))
    plan = compare(held((0, 0)), [first, second], set(range(10)))
    assert len(plan.steps[1].recipes) == 10
    assert len(plan.steps[0].recipes) == min(terms, 200)
