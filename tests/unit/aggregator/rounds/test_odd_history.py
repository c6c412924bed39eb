"""When an aggregator says that its own history of the run is the odd one."""

import dataclasses

import pytest

from aggregator.inbound import odd_history
from aggregator.strategies.base import RoundPlan
from shoal.protocol.states import FORKED_ROUND, TranscriptHead
from tests.helpers.plans import engine_of, run_plan

NAMES = ("dev-1", "dev-2", "dev-3", "dev-4", "dev-5")
RUN = run_plan(min_contributors=3)
OURS, OTHER = b"o" * 32, b"x" * 32


@pytest.fixture
def state():
    found, _ = engine_of(RUN).begin(NAMES)
    return dataclasses.replace(found, round=4, plan=RoundPlan(4, {}, {}), head=OURS)


def heads(count, round_, transcript, run_id=RUN.run_id):
    return {name: TranscriptHead(run_id, round_, transcript) for name in NAMES[:count]}


@pytest.mark.parametrize(
    ("found", "odd"),
    [
        (heads(3, 9, OTHER), True),
        (heads(3, 4, OTHER), True),
        (heads(3, FORKED_ROUND, OTHER), True),
        (heads(2, 9, OTHER), False),
        (heads(3, 4, OURS), False),
        (heads(3, FORKED_ROUND, OURS), False),
        (heads(3, 3, OTHER), False),
        (heads(3, 9, OTHER, b"another run id!!"), False),
        (heads(2, 9, OTHER) | {"dev-3": TranscriptHead(RUN.run_id, 9, b"y" * 32)}, False),
        (heads(2, 9, OTHER) | {"stranger": TranscriptHead(RUN.run_id, 9, OTHER)}, False),
    ],
)
def test_another_history_needs_as_many(state, found, odd):
    """As many devices as certify a state must agree on another history."""
    assert bool(odd_history(state, found)) is odd


def test_uploads_and_presences_count(state):
    """Uploads and presences count together."""
    state = dataclasses.replace(state, others=state.others.adding("dev-4", OTHER))
    assert "3 devices" in odd_history(state, heads(2, 4, OTHER))
    assert not odd_history(state, heads(1, 4, OTHER))
