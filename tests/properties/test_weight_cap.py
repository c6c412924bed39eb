"""Capped weights for any sample counts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aggregator.numerics.averaging import capped_weights
from aggregator.rounds.screening import NORM_LIMIT_RATIO, screen
from tests.helpers.plans import contribution

COUNTS = st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=40)
CAPS = st.one_of(st.just(0.0), st.floats(1, 100))
NORMS = st.lists(st.floats(0, 1e30, allow_subnormal=False), min_size=3, max_size=20)


@given(COUNTS, CAPS)
def test_capped_weights_keep_their_order(counts, cap):
    """Capped weights are bounded ordered and not all zero."""
    weights = np.array(counts, np.float64)
    capped = capped_weights(weights, cap)
    assert capped.shape == weights.shape
    assert capped.sum() > 0
    assert (capped <= weights).all()
    assert (np.diff(capped[np.argsort(weights, kind="stable")]) >= 0).all()
    if cap:
        assert (capped <= cap * np.median(weights)).all()
        below = weights <= np.median(weights)
        assert (capped[below] == weights[below]).all()
    else:
        assert (capped == weights).all()


@given(NORMS)
def test_half_of_a_first_round_is_accepted(norms):
    """At least half of a first round is accepted and all of it is within the limit."""
    made = [contribution(f"dev-{i:02d}", None, norm=norm) for i, norm in enumerate(norms)]
    done = screen(made, {})
    assert len(done.accepted) + len(done.refused) == len(made)
    assert 2 * len(done.accepted) >= len(made)
    middle = sorted(norms)[(len(norms) - 1) // 2]
    if middle:
        assert all(c.norm <= NORM_LIMIT_RATIO * middle for c in done.accepted)
        assert all(norm > NORM_LIMIT_RATIO * middle for norm in done.refused.values())
