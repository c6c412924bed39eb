"""Recipes give the same bits on every platform, checked against exact arithmetic and a simulated processor.

Catching up: which steps apply, which states need a checkpoint, and which are out of step.
"""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_client.models.recipes import BLOCK, TINY, catch_up, evaluate, weighted_sum
from shoal.errors import IntegrityError, UsageError
from shoal.protocol.states import StateId
from tests.helpers.model_states import recipe, step, vector

SMALLEST_NORMAL = 2.0**-126
floats = st.floats(-(2.0**60), 2.0**60, width=32) | st.floats(-(2.0**-124), 2.0**-124, width=32)
weights = st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.7, 1 / 3, 1e-12, 1e6]) | st.floats(1e-6, 1e6)
cases = st.integers(1, 5).flatmap(
    lambda d: st.lists(st.tuples(weights, hnp.arrays(np.float32, d, elements=floats)), min_size=1, max_size=4)
)


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32).tolist()


def rounded(exact, *, drops_denormals):
    """Round a number to float32, as a processor does that keeps denormal numbers or drops them before rounding."""
    if drops_denormals and abs(exact) < SMALLEST_NORMAL:
        return np.float32(np.copysign(0.0, exact))
    return np.float32(exact)


def cleared(value, *, drops_denormals):
    if drops_denormals and abs(value) < SMALLEST_NORMAL:
        value = np.float32(np.copysign(0.0, value))
    return np.float32(0) if abs(value) < TINY else value


def reference(parts, *, drops_denormals):
    """Evaluate coordinate by coordinate: float64 holds products of float32 exactly, and rounds sums harmlessly."""
    out = []
    for column in zip(*(values for _, values in parts), strict=True):
        total = None
        for (weight, _), value in zip(parts, column, strict=True):
            value = cleared(value, drops_denormals=drops_denormals)
            product = np.float64(np.float32(weight)) * np.float64(value)
            product = cleared(rounded(product, drops_denormals=drops_denormals), drops_denormals=drops_denormals)
            if total is None:
                total = product
            else:
                exact = np.float64(total) + np.float64(product)
                total = cleared(rounded(exact, drops_denormals=drops_denormals), drops_denormals=drops_denormals)
        out.append(total)
    return out


@given(cases)
def test_bits_follow_from_the_rules_alone(parts):
    """On processors that keep denormal numbers and on those that drop them."""
    expected = reference(parts, drops_denormals=False)
    assert bits(weighted_sum(parts)) == bits(expected)
    assert bits(expected) == bits(reference(parts, drops_denormals=True))


def long_case(length=3 * BLOCK + 17):
    rng = np.random.default_rng(5)
    return [(w, (rng.integers(-(2**20), 2**20, length) / 2**17).astype(np.float32)) for w in (0.7, 0.2, 0.1, 1.0)]


def test_a_long_sum_has_the_known_bits():
    """The answer was computed with float64 and one rounding an operation; no platform may differ."""
    made = weighted_sum(long_case())
    assert hashlib.sha256(made.astype("<f4").tobytes()).hexdigest()[:16] == "641050ef3872b30e"


def test_layout_changes_no_bit():
    """Layout and alignment change no bit. Another order does, so it matters that all devices use the same."""
    parts = long_case(1001)
    strided = [(w, np.repeat(v, 2)[::2]) for w, v in parts]
    shifted = [(w, np.concatenate([v[:1], v])[1:]) for w, v in parts]
    assert weighted_sum(parts).tobytes() == weighted_sum(strided).tobytes() == weighted_sum(shifted).tobytes()
    assert weighted_sum(parts).tobytes() != weighted_sum(parts[::-1]).tobytes()


def test_minus_zero_and_denormals_are_zero():
    """In what is made of them; the arguments stay as they were."""
    values = vector(-0.0, 1e-39, -1e-45, 2.0**-126, -(2.0**-125), 1.0)
    assert bits(weighted_sum([(1.0, values)])) == bits([0, 0, 0, 0, -(2.0**-125), 1])
    assert bits(weighted_sum([(2.0, values), (1.0, values)]))[:4] == [0, 0, 0, 0]
    assert bits(values) == bits([-0.0, 1e-39, -1e-45, 2.0**-126, -(2.0**-125), 1.0])
    assert bits(weighted_sum([(-1.0, vector(0.0)), (1.0, vector(-0.0))])) == bits([0])
    assert bits(weighted_sum([(1.0, vector(2.0**-124)), (-1.0, vector(1.25 * 2.0**-124))])) == bits([0])
    assert bits(weighted_sum([(1e6, vector(1e-39))])) == bits([0])


@pytest.mark.parametrize(
    "parts",
    [
        [(1.0, vector(np.nan))],
        [(1.0, vector(np.inf))],
        [(1e6, vector(3e38))],
        [(1.0, vector(3e38)), (1.0, vector(3e38)), (-1.0, vector(3e38))],
        [(0.0, vector(np.inf))],
        [(1e6, vector(3e38)), (-1e6, vector(3e38))],
    ],
)
def test_infinite_results_are_refused(parts):
    """Results that are not finite are refused."""
    with pytest.raises(IntegrityError, match="NaN or infinite"):
        weighted_sum(parts)


def test_unlike_vectors_are_refused():
    """Vectors that do not belong together are refused."""
    for other in (vector(1, 2), np.array([1.0]), vector(1)[None]):
        with pytest.raises(UsageError, match="a vector of shape"):
            weighted_sum([(1.0, vector(1)), (1.0, other)])


def test_states_come_first_then_the_mean():
    """A recipe takes its states in order and the mean last."""
    held = {StateId(0, 3): vector(10, 20), StateId(1, 2): vector(1, 2)}
    restart = recipe(1, 4, (0, 3, 0.5), (1, 2, 2.0), mean=0.25)
    assert evaluate(restart, held, vector(4, 8)).tolist() == [8, 16]
    assert evaluate(recipe(0, 4, (0, 3)), held).tolist() == [10, 20]


def test_wrong_ingredients_are_refused():
    """A recipe with the wrong ingredients is refused."""
    held = {StateId(0, 3): vector(1)}
    with pytest.raises(UsageError, match="needs a mean"):
        evaluate(recipe(0, 4, (0, 3), mean=1.0), held)
    with pytest.raises(UsageError, match="has no mean"):
        evaluate(recipe(0, 4, (0, 3)), held, vector(1))
    with pytest.raises(IntegrityError, match="names state 3 of model 1") as caught:
        evaluate(recipe(0, 4, (1, 3)), held)
    assert "checkpoint" in caught.value.hint


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
