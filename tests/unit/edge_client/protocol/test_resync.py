"""Requests for lost messages: a device makes them after it has received the announcement again, since a broker sends in order."""

import pytest

from edge_client.protocol.resync import LOOK_CAP_S, LOOK_S, LOOKS, Resync

FIRST, SECOND = b"1" * 16, b"2" * 16
MODELS = ("s/model/aa", "s/model/bb")


class Broker:
    """Records the topics that are requested again."""

    def __init__(self):
        self.asked = []

    def unsubscribe(self, topic_filter):
        self.asked.append(topic_filter)

    def subscribe(self, topic_filter):
        assert self.asked[-1] == topic_filter

    def take(self):
        asked, self.asked = self.asked, []
        return [a.removesuffix("/#") for a in asked]


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def lookout(broker):
    return Resync(broker, "s/round")


def look(lookout, broker):
    """Wait for the models of the first announcement until the lookout requests it again."""
    lookout.found(FIRST, ())
    for second in (0.0, 9.0):
        lookout.tick(second, MODELS)
    assert broker.take() == ["s/round"]


def test_missing_models_are_requested_once_the_announcement_has_arrived_again(lookout, broker):
    assert not lookout.found(FIRST, ())
    lookout.tick(0.0, MODELS)
    lookout.tick(LOOK_S, MODELS)
    assert broker.take() == []
    lookout.tick(LOOK_S + 0.1, MODELS)
    assert broker.take() == ["s/round"]
    assert lookout.found(FIRST, MODELS)
    assert broker.take() == list(MODELS)


def test_a_model_that_has_arrived_is_not_requested(lookout, broker):
    """A model that has arrived was only slow."""
    look(lookout, broker)
    assert lookout.found(FIRST, MODELS[1:])
    assert broker.take() == ["s/model/bb"]


def test_the_announcement_of_another_round_says_nothing_of_its_models(lookout, broker):
    """The device subscribed to them only just now."""
    look(lookout, broker)
    assert not lookout.found(SECOND, MODELS)
    assert not lookout.found(SECOND, MODELS), "the copy that we asked for, before these models"
    assert broker.take() == []


def test_an_announcement_that_comes_again_by_itself_asks_for_nothing(lookout, broker):
    lookout.found(FIRST, ())
    assert not lookout.found(FIRST, MODELS)
    assert broker.take() == []


def test_requests_are_rare_while_messages_arrive(lookout, broker):
    """Requests do not stop, since the messages that arrive may not be the missing ones."""
    looks = []
    lookout.tick(0.0, MODELS)
    for second in range(1, 500):
        lookout.heard(float(second))
        lookout.tick(second + 0.9, MODELS)
        if broker.take():
            looks.append(second)
    assert looks == [120, 241, 362, 483]


def test_nothing_is_requested_if_nothing_is_missing(lookout, broker):
    lookout.tick(1000.0, ())
    assert broker.take() == []


def test_requests_get_rarer_and_then_cover_all_topics(lookout, broker):
    """The broker may have lost the announcement too."""
    looks, asked = [], []
    for tenths in range(3000):
        lookout.tick(tenths / 10, MODELS)
        if broker.asked:
            looks.append(tenths / 10)
            asked.append(broker.take())
    pauses = [round(b - a) for a, b in zip([0.0, *looks], looks, strict=False)]
    assert pauses == [5, 10, 20, 40] + [LOOK_CAP_S] * 3
    assert asked == [["s/round"]] * LOOKS + [[*MODELS, "s/round"]] * 3
    lookout.tick(301.0, MODELS[:1])
    lookout.tick(301.0 + LOOK_S + 0.1, MODELS[:1])
    assert broker.take() == ["s/round"], "another topic is missing: start again"


def test_answers_make_looks_no_more_frequent(lookout, broker):
    """A device that has to wait long does not receive all retained messages every few seconds."""
    looks = []
    for second in range(600):
        lookout.tick(float(second), MODELS)
        if broker.take():
            looks.append(second)
            lookout.heard(float(second))
            lookout.found(FIRST, MODELS)
            broker.take()
    assert len(looks) < 16
    assert looks[-1] - looks[-2] >= LOOK_CAP_S
