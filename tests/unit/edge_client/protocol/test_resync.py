"""When a device asks the broker again for what it misses: after the announcement, which overtakes nothing, came again."""

import pytest

from edge_client.protocol.resync import LOOK_CAP_S, LOOK_S, LOOKS, Resync

FIRST, SECOND = b"1" * 16, b"2" * 16
MODELS = ("s/model/aa", "s/model/bb")


class Broker:
    """Writes down what is asked for again."""

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
    """Wait for the models of the first announcement until the lookout asks for it."""
    lookout.found(FIRST, ())
    for second in (0.0, 9.0):
        lookout.tick(second, MODELS)
    assert broker.take() == ["s/round"]


def test_what_is_missing_is_asked_for_when_the_announcement_came_again(lookout, broker):
    assert not lookout.found(FIRST, ())
    lookout.tick(0.0, MODELS)
    lookout.tick(LOOK_S, MODELS)
    assert broker.take() == []
    lookout.tick(LOOK_S + 0.1, MODELS)
    assert broker.take() == ["s/round"]
    assert lookout.found(FIRST, MODELS)
    assert broker.take() == list(MODELS)


def test_what_came_in_the_meantime_is_not(lookout, broker):
    """It was only slow."""
    look(lookout, broker)
    assert lookout.found(FIRST, MODELS[1:])
    assert broker.take() == ["s/model/bb"]


def test_the_announcement_of_another_round_says_nothing_of_its_models(lookout, broker):
    """They were asked for just now."""
    look(lookout, broker)
    assert not lookout.found(SECOND, MODELS)
    assert not lookout.found(SECOND, MODELS), "the copy that we asked for, before these models"
    assert broker.take() == []


def test_an_announcement_that_comes_again_by_itself_asks_for_nothing(lookout, broker):
    lookout.found(FIRST, ())
    assert not lookout.found(FIRST, MODELS)
    assert broker.take() == []


def test_as_long_as_something_arrives_it_looks_seldom(lookout, broker):
    """But it does: what arrives may be anybody's, and what is missing lost."""
    looks = []
    lookout.tick(0.0, MODELS)
    for second in range(1, 500):
        lookout.heard(float(second))
        lookout.tick(second + 0.9, MODELS)
        if broker.take():
            looks.append(second)
    assert looks == [120, 241, 362, 483]


def test_nothing_is_looked_for_where_nothing_is_missing(lookout, broker):
    lookout.tick(1000.0, ())
    assert broker.take() == []


def test_looks_get_rarer_and_then_go_for_everything(lookout, broker):
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
    assert broker.take() == ["s/round"], "something else is missing: begin anew"


def test_answers_make_looks_no_more_frequent(lookout, broker):
    """A device that waits for what may take any time is not sent all of it every few seconds."""
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
