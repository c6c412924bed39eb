"""What one device can't do to a run: hold everybody up, or report figures that no device has."""

import dataclasses

import pytest

from aggregator.rounds.duplicates_and_limits import MAX_MARGIN, Decision
from aggregator.rounds.state import CameOnline, DeadlinePassed, Left, WentOffline
from edge_client.learning.update import MARGIN_CLIP
from shoal.protocol.messages import Assignment, Phase, Share
from tests.helpers.plans import engine_of, run_plan, upload_of

DEVICES = ("dev-1", "dev-2", "dev-3")
DIGEST = b"d" * 32


def opened(run, devices=DEVICES):
    """Return (engine, state) with the first round open."""
    engine = engine_of(run)
    state, _ = engine.begin(devices)
    for device in devices:
        state, _ = engine.handle(state, CameOnline(device))
    return engine, state


def one_alone():
    """Return (engine, state, device) with a round open in which one device trains and the others look on."""
    engine, state = opened(run_plan(participation=0.1))
    (device,) = state.plan.assignments
    return engine, state, device


@pytest.mark.parametrize("leave", [WentOffline, Left])
def test_lone_device_that_goes_stops_nobody(leave):
    """A device asked alone that goes does not stop the fleet."""
    engine, state, device = one_alone()
    state, actions = engine.handle(state, leave(device))
    assert actions == ()
    state, (closed, _) = engine.handle(state, DeadlinePassed(1))
    assert (closed.record.contributed, closed.record.missing) == (0, (device,))
    assert set(state.plan.assignments) < set(DEVICES) - {device}


def test_nor_after_the_deadline():
    """One that goes after the deadline does not either."""
    engine, state, device = one_alone()
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    state, actions = engine.handle(state, WentOffline(device))
    assert len(actions) == 2


def test_a_margin_beyond_the_clip_is_refused():
    """Unclipped, one device could decide every paired test."""
    assert MAX_MARGIN == MARGIN_CLIP
    engine, state = opened(run_plan())
    assignment = Assignment(int(Phase.SCORE), (0, 1), int(Share.VALIDATION), train=False, evaluate=False, margins=True)
    state = dataclasses.replace(
        state, plan=dataclasses.replace(state.plan, assignments=dict.fromkeys(DEVICES, assignment))
    )
    uploads = {
        margin: upload_of(engine, state, "dev-1", margins=(0.0, margin))[0] for margin in (5.0, -5.0, 5.01, -9e9)
    }
    stored = [
        margin for margin, upload in uploads.items() if engine.validate(state, upload, DIGEST)[0] is Decision.STORE
    ]
    assert stored == [5.0, -5.0]
