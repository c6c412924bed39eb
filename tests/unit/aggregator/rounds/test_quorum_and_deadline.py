"""A round opens and closes with the quorum, or at its deadline; an abandoned round closes empty."""

import dataclasses

import pytest

from aggregator.persistent import PersistentMap, PersistentSet
from aggregator.rounds.held_models import HeldModels
from aggregator.rounds.quorum_and_deadline import is_abandoned, may_close, may_open, uploads_needed
from aggregator.rounds.state import EngineState, on_declined, on_online
from aggregator.rounds.state import opened as with_plan
from aggregator.strategies.base import RoundPlan
from shoal.protocol.messages import Assignment, DeclineReason, Phase, Share
from tests.helpers.plans import run_plan

DEVICES = tuple(f"dev-{i}" for i in range(10))
TRAIN = Assignment(int(Phase.TRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)


def gathering(online, *, round_=1, late=False, **plan):
    """Return the state of a fleet of ten between two rounds, with the first ``online`` devices there."""
    run = run_plan(**{"quorum": 0.7, "min_contributors": 2, **plan})
    held, there = HeldModels.none(3), PersistentSet(DEVICES[:online])
    return EngineState(PersistentSet(DEVICES), None, run, held, there, round=round_, deadline_passed=late, newest=3)


def open_round(received=0, *, online=10, asked=10, late=False, final=False):
    """Return the state with a round open for the first ``asked`` devices, of which the first ``received`` have uploaded."""
    plan = RoundPlan(2, {}, dict.fromkeys(DEVICES[:asked], TRAIN), final=final)
    state = with_plan(gathering(online), plan)
    answers = dict.fromkeys(DEVICES[:received], (Phase.TRAIN, b"digest"))
    return dataclasses.replace(state, received=PersistentMap(answers), deadline_passed=late)


@pytest.mark.parametrize(
    ("online", "round_", "late", "opens"),
    [
        (9, 0, False, False),
        (10, 0, False, True),
        (6, 1, False, False),
        (7, 1, False, True),
        (2, 0, True, True),
        (2, 1, True, True),
        (1, 1, True, False),
    ],
)
def test_round_opens_by_quorum_or_deadline(online, round_, late, opens):
    """The first round waits for all ten devices."""
    assert may_open(gathering(online, round_=round_, late=late)) is opens


def test_an_empty_fleet_opens_no_round():
    assert not may_open(dataclasses.replace(gathering(0, late=True), devices=PersistentSet()))


@pytest.mark.parametrize(
    ("received", "online", "late", "closes"),
    [
        (10, 10, False, True),
        (9, 10, False, False),
        (7, 10, False, False),
        (7, 10, True, True),
        (6, 10, True, False),
        (7, 7, False, True),
        (6, 6, False, False),
    ],
)
def test_round_closes_by_quorum(received, online, late, closes):
    """A round closes with the quorum when the others are offline or late."""
    assert may_close(open_round(received, online=online, late=late)) is closes


def test_newer_version_finishes_the_round():
    """A newer key version lets devices finish the round that they have begun."""
    state = dataclasses.replace(declined(open_round(2), *DEVICES[2:9], reason=DeclineReason.KEYS), newest=4)
    assert not may_close(state), "one may still train under the earlier version"
    assert may_close(dataclasses.replace(state, deadline_passed=True))
    last = declined(state, DEVICES[9], reason=DeclineReason.KEYS)
    assert may_close(last)
    assert not may_close(dataclasses.replace(last, newest=3)), "the aggregator does not have the newer keys yet"
    assert not may_close(dataclasses.replace(last, plan=dataclasses.replace(last.plan, final=True)))


def test_deserted_round_is_abandoned():
    """One device of ten has an order and is offline."""
    state = dataclasses.replace(open_round(asked=1, late=True), unavailable=PersistentSet(DEVICES[:1]))
    assert is_abandoned(state)
    assert may_close(state)
    assert not is_abandoned(dataclasses.replace(state, deadline_passed=False))
    assert not is_abandoned(dataclasses.replace(state, unasked=0))
    assert not is_abandoned(dataclasses.replace(state, unavailable=PersistentSet()))
    assert not is_abandoned(dataclasses.replace(state, plan=dataclasses.replace(state.plan, final=True)))


def declined(state, *devices, reason=DeclineReason.STATE):
    for device in devices:
        state = on_declined(state, device, reason)
    return state


def test_missing_state_counts_in_no_quorum():
    """A device that lacks a state does not count in the quorum."""
    state = declined(open_round(3), *DEVICES[3:])
    assert (state.asked, uploads_needed(state)) == (3, 3)
    assert may_close(state)
    other = declined(open_round(1), *DEVICES[1:], reason=DeclineReason.DATA)
    assert (other.asked, uploads_needed(other), may_close(other)) == (10, 2, False), "a mean takes two"


def test_all_declined_closes_at_deadline():
    """A round that all devices present have declined for lack of a state closes at its deadline."""
    state = declined(open_round(online=4), *DEVICES[:4])
    assert not may_close(state), "a device that holds the model may come back"
    late = dataclasses.replace(state, deadline_passed=True)
    assert may_close(late)
    assert not may_close(dataclasses.replace(late, plan=dataclasses.replace(late.plan, final=True)))
    assert not may_close(dataclasses.replace(late, online=PersistentSet())), "no other device waits"
    assert not may_close(on_online(late, DEVICES[4])), "it may hold the model"
    assert not may_close(declined(open_round(online=4, late=True), *DEVICES[:4], reason=DeclineReason.DATA))


def test_round_of_checkpoints_closes():
    """A round of checkpoints closes when those asked have answered or are gone."""

    def collecting(received, online, *, late=False):
        return dataclasses.replace(open_round(received, online=online, asked=4, late=late), checkpoints_only=True)

    assert may_close(collecting(4, 10))
    assert may_close(collecting(1, 1))
    assert not may_close(collecting(1, 10))
    assert may_close(collecting(1, 10, late=True))
    assert not may_close(collecting(0, 10, late=True))
