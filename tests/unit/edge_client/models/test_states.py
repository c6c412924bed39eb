"""Model states in memory: steps add states, and digests name their bits."""

import numpy as np
import pytest

from crypto.mask.schedule import state_digest
from edge_client.models.states import ModelState
from shoal.errors import IntegrityError, UsageError
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.states import HeldState, StateId
from tests.helpers.model_states import FLEET, RUN_ID, chain, origins, recipe, step, vector


def test_origins_are_the_states_of_round_0():
    keys = chain().take()
    states = origins(vector(1, 2), vector(3, 4), keys=keys)
    assert [state.theta.tolist() for state in states.held.values()] == [[1, 2], [3, 4]]
    assert states.digests() == {
        StateId(m, 0): state_digest(keys.digest_key, RUN_ID, m, 0, theta)
        for m, theta in enumerate([vector(1, 2), vector(3, 4)])
    }


def test_a_step_adds_states_and_changes_none():
    steps = chain()
    before = origins(vector(1, 2), vector(5, 5), keys=steps.take())
    keys = steps.take()
    fork = step(2, recipe(2, 2, (0, 0), mean=1.0), recipe(3, 2, (0, 0), (1, 0, 0.5)))
    after = before.apply(fork, {2: vector(10, 10)}, keys)
    assert list(before.held) == [StateId(0, 0), StateId(1, 0)]
    assert {(id_.model, id_.round): s.theta.tolist() for id_, s in after.held.items()} == {
        (0, 0): [1, 2],
        (1, 0): [5, 5],
        (2, 2): [11, 12],
        (3, 2): [3.5, 4.5],
    }
    assert after.held[StateId(2, 2)].digest == keys.state_digest(2, vector(11, 12))
    assert after.held[StateId(0, 0)] is before.held[StateId(0, 0)]


def test_shared_models_take_their_segment():
    """Origins are whole; later states hold the shared segment, or a cluster's."""
    steps = chain()
    before = origins(vector(1, 2, 3), keys=steps.take())
    spans = {0: slice(0, 2), SHARED_MODEL: slice(2, 3)}
    first = step(2, recipe(0, 2, (0, 0), mean=1.0), recipe(SHARED_MODEL, 2, (0, 0), mean=1.0))
    means = {0: vector(10, 10), SHARED_MODEL: vector(5)}
    after = before.apply(first, means, steps.take(), span_of=spans.__getitem__)
    assert after.newest(0).theta.tolist() == [11, 12]
    assert after.newest(SHARED_MODEL).theta.tolist() == [8]
    second = step(3, recipe(0, 3, (0, 2), mean=1.0), recipe(SHARED_MODEL, 3, (SHARED_MODEL, 2), mean=1.0))
    last = after.apply(second, means, steps.take(), span_of=spans.__getitem__)
    assert last.newest(0).theta.tolist() == [21, 22]
    assert last.newest(SHARED_MODEL).theta.tolist() == [13]


def test_state_is_read_only_and_not_printed():
    """A state can't be changed unnoticed; digest keys and vectors are not printed."""
    state = origins(vector(1.5, 2)).newest(0)
    with pytest.raises(ValueError, match="read-only"):
        state.theta[0] = 3
    assert "1.5" not in repr(state)
    assert repr(state.digest_key) not in repr(state)


def test_other_bits_have_other_digests():
    """Equal vectors with other bits have other digests."""
    keys = chain().take()
    made = [
        ModelState.of(StateId(0, 1), vector(zero), run_id=RUN_ID, digest_key=keys.digest_key) for zero in (0.0, -0.0)
    ]
    assert made[0].digest != made[1].digest
    assert np.array_equal(made[0].theta, made[1].theta)


def test_unnamed_states_are_forgotten():
    """States that are not named are forgotten."""
    states = origins(vector(1), vector(2), vector(3)).keep({StateId(1, 0), StateId(7, 7)})
    assert list(states.held) == [StateId(1, 0)]
    assert states.newest(0) is None


def test_statement_names_all_states_in_order():
    states = origins(vector(1), vector(2))
    statement = states.statement("dev-1", 4)
    assert (statement.fleet, statement.run_id, statement.round, statement.device) == (FLEET, RUN_ID, 4, "dev-1")
    assert statement.states == tuple(HeldState(m, 0, states.newest(m).digest) for m in (0, 1))


def test_step_without_its_mean_is_refused():
    """A step with other keys, without its mean, or from a state not held is refused."""
    states = origins(vector(1))
    two = chain()
    two.skip_to(2)
    keys = two.take()
    for others in (chain(run_id=b"x" * 16).take(), chain().take()):
        with pytest.raises(UsageError, match="the keys of round 1"):
            states.apply(step(2, recipe(0, 2, (0, 0))), {}, others)
    with pytest.raises(UsageError, match="needs a mean"):
        states.apply(step(2, recipe(0, 2, (0, 0), mean=1.0)), {1: vector(1)}, keys)
    with pytest.raises(IntegrityError, match="not held"):
        states.apply(step(2, recipe(0, 2, (0, 1))), {}, keys)
