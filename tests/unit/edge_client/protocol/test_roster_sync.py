"""Requests for a whole roster: repeated until it arrives, but not for ever, even with a hostile aggregator."""

import dataclasses

import numpy as np
import pytest

from edge_client.protocol.roster_sync import MOST_TRIES, STARTED, WHOLE_AGAIN_S, RosterSync
from edge_client.protocol.session_io import ApplyRosterChange, Log, Resubscribe, Subscribe, Unsubscribe
from shoal.protocol.documents import RosterChange
from shoal.protocol.topics import TopicKind
from tests.helpers.sessions import FACTS

WHOLE, NO_MORE = Resubscribe(TopicKind.ROSTER), Unsubscribe(TopicKind.ROSTER)
HELD = FACTS.roster.sequence


def change(sequence, *, after=0, devices=4, signature=b"s" * 64):
    """Return an announced change of the roster."""
    return RosterChange(
        after=after,
        signature=signature,
        fleet="demo",
        sequence=sequence,
        issued_at_s=1,
        expires_at_s=2,
        aggregator=None,
        devices=devices,
        places=np.empty(0, np.uint32),
        members=(),
        labels=(),
        revoked_stay=0,
        revoked=(),
        keys_since=1,
    )


def at(now_s=0.0, **roster):
    """Return the surroundings at a time, with another roster in force."""
    return dataclasses.replace(FACTS, now_s=now_s, roster=dataclasses.replace(FACTS.roster, **roster))


def test_only_changes_at_the_start():
    """Only changes are subscribed at the start."""
    assert (NO_MORE, Subscribe(TopicKind.ROSTER_CHANGE)) == STARTED


def test_change_in_force_is_applied():
    """A change of the roster in force is applied; one that leads to no roster of the owner asks for the whole."""
    following = change(HELD + 1, after=HELD)
    state, done = RosterSync().changed(following, at())
    assert done == (ApplyRosterChange(following),)
    assert state.taken(following, at(sequence=HELD + 1)) == (RosterSync(), ())
    state, done = state.taken(following, at(5.0))
    assert done == (WHOLE,)
    assert (state.wanted, state.devices, state.asked_s) == (HELD + 1, 4, 5.0)


def test_other_signature_asks_once_for_whole():
    """Under our sequence; older changes and the one in force are ignored."""
    for sequence in (HELD - 1, HELD):
        assert RosterSync().changed(change(sequence, signature=FACTS.roster.signature), at())[1] == ()
    state, done = RosterSync().changed(change(HELD), at())
    assert done == (WHOLE,)
    assert state.changed(change(HELD), at())[1] == ()


def test_requests_get_rarer_and_then_stop():
    state, done = RosterSync().changed(change(1 << 31, after=1 << 31), at())
    asked, told = list(done), []
    for second in range(2 * 3600):
        state, done = state.ticked(at(float(second)))
        asked += [action for action in done if action == WHOLE]
        told += [action.text for action in done if isinstance(action, Log)]
    assert len(asked) == MOST_TRIES
    assert told == ["the whole roster did not arrive: giving up"]
    assert state.devices is None
    state, done = state.changed(change(HELD + 2, after=HELD + 1), at(8000.0))
    assert done == (WHOLE,)
    state, done = state.taken(None, at(8001.0, sequence=HELD + 2))
    assert (state.wanted, done) == (0, (NO_MORE,))


def test_request_ends_with_any_newer_roster():
    """The first request is repeated after a minute, and after newer keys, which may open a whole that could not be read."""
    changes = Resubscribe(TopicKind.ROSTER_CHANGE)
    assert RosterSync().after_keys() == (changes,)
    asking, _ = RosterSync().changed(change(HELD + 2, after=HELD + 1), at())
    assert asking.after_keys() == (changes, WHOLE)
    state, done = asking.ticked(at(WHOLE_AGAIN_S))
    assert done == ()
    assert state.ticked(at(WHOLE_AGAIN_S + 1.0))[1] == (WHOLE,)
    state, done = asking.taken(None, at(sequence=HELD + 5))
    assert (state.wanted, state.devices, done) == (0, None, (NO_MORE,))


@pytest.mark.parametrize("listed", [True, False])
def test_roster_without_us_revokes_us(listed):
    """A roster without this device revokes it."""
    state, _ = RosterSync().taken(None, at(sequence=HELD + 1, listed=listed))
    assert state.revoked is not listed


def test_expiry_and_its_end_are_told_once():
    """An expiry is told once and so is its end."""
    state, done = RosterSync().checked(at(expired=True, until="2026-01-01"))
    assert state.lapsed
    assert [(a.level, a.facts["until"]) for a in done] == [("warning", "2026-01-01")]
    assert state.checked(at(expired=True)) == (state, ())
    state, done = state.checked(at(until="2027-01-01"))
    assert not state.lapsed
    assert [(a.level, a.facts["until"]) for a in done] == [("info", "2027-01-01")]
