"""Requests for lost messages: a device makes them after it has received the announcement again, since a broker sends in order."""

import dataclasses

import pytest

from edge_client.protocol.resync import HEARD_STEP_S, LOOK_CAP_S, LOOK_S, LOOKS, Resync
from edge_client.protocol.session_io import Resubscribe
from shoal.protocol.topics import TopicKind

FIRST, SECOND = b"1" * 16, b"2" * 16
ROUND = Resubscribe(TopicKind.ROUND)
MODELS = (Resubscribe(TopicKind.MODEL, "aa"), Resubscribe(TopicKind.MODEL, "bb"))


class Lookout:
    """Holds the state, and collects the requests."""

    def __init__(self):
        self.state, self.asked = Resync(), []

    def tick(self, now_s, missing):
        self.state, asked = self.state.ticked(now_s, missing)
        self.asked.extend(asked)

    def heard(self, now_s):
        self.state = self.state.heard(now_s)

    def found(self, nonce, missing):
        self.state, asked, repeats = self.state.announced(nonce, missing)
        self.asked.extend(asked)
        return repeats

    def take(self):
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def lookout():
    return Lookout()


def look(lookout):
    """Wait for the models of the first announcement until the lookout requests it again."""
    lookout.found(FIRST, ())
    for second in (0.0, 9.0):
        lookout.tick(second, MODELS)
    assert lookout.take() == [ROUND]


def test_missing_models_are_requested_once(lookout):
    """Missing models are requested once the announcement has arrived again."""
    assert not lookout.found(FIRST, ())
    lookout.tick(0.0, MODELS)
    lookout.tick(LOOK_S, MODELS)
    assert lookout.take() == []
    lookout.tick(LOOK_S + 0.1, MODELS)
    assert lookout.take() == [ROUND]
    assert lookout.found(FIRST, MODELS)
    assert lookout.take() == list(MODELS)


def test_arrived_model_is_not_requested(lookout):
    """A model that has arrived was only slow."""
    look(lookout)
    assert lookout.found(FIRST, MODELS[1:])
    assert lookout.take() == [MODELS[1]]


def test_another_rounds_models_are_unknown(lookout):
    """The device subscribed to them only just now."""
    look(lookout)
    assert not lookout.found(SECOND, MODELS)
    assert not lookout.found(SECOND, MODELS), "the copy that we asked for, before these models"
    assert lookout.take() == []


def test_unasked_repetition_asks_for_nothing(lookout):
    """An announcement that comes again by itself asks for nothing, nor does a long time if nothing is missing."""
    lookout.found(FIRST, ())
    lookout.tick(1000.0, ())
    assert not lookout.found(FIRST, MODELS)
    assert lookout.take() == []


def test_requests_are_rare_meanwhile(lookout):
    """Requests do not stop, since the messages that arrive may not be the missing ones."""
    looks = []
    lookout.tick(0.0, MODELS)
    for second in range(1, 500):
        lookout.heard(float(second))
        lookout.tick(second + 0.9, MODELS)
        if lookout.take():
            looks.append(second)
    assert looks == [120, 241, 362, 483]


def test_requests_get_rarer(lookout):
    """The broker may have lost the announcement too."""
    looks, asked = [], []
    for tenths in range(3000):
        lookout.tick(tenths / 10, MODELS)
        if lookout.asked:
            looks.append(tenths / 10)
            asked.append(lookout.take())
    pauses = [round(b - a) for a, b in zip([0.0, *looks], looks, strict=False)]
    assert pauses == [5, 10, 20, 40] + [LOOK_CAP_S] * 3
    assert asked == [[ROUND]] * LOOKS + [[*MODELS, ROUND]] * 3
    lookout.tick(301.0, MODELS[:1])
    lookout.tick(301.0 + LOOK_S + 0.1, MODELS[:1])
    assert lookout.take() == [ROUND], "another topic is missing: start again"


def test_answers_make_looks_no_more_frequent(lookout):
    """A device that has to wait long does not receive all retained messages every few seconds."""
    looks = []
    for second in range(600):
        lookout.tick(float(second), MODELS)
        if lookout.take():
            looks.append(second)
            lookout.heard(float(second))
            lookout.found(FIRST, MODELS)
            lookout.take()
    assert len(looks) < 16
    assert looks[-1] - looks[-2] >= LOOK_CAP_S


def test_chunks_of_one_message_are_one_state():
    """The chunks of one message make one state unless requests were in vain."""
    first = Resync().heard(7.0)
    assert first.heard_s == 7.0
    assert first.heard(7.0 + HEARD_STEP_S / 2) is first
    assert first.heard(8.0).heard_s == 8.0
    silent = dataclasses.replace(first, silent=2)
    assert silent.heard(7.0).silent == 0
