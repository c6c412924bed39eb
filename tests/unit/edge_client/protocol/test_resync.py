"""Requests for lost messages: a device makes them after it has received the announcement again, since a broker sends in order."""

import pytest

from edge_client.protocol.resync import LOOK_CAP_S, LOOK_S, LOOKS, Resync
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
