"""When a device asks the broker again for what it misses: after the announcement, which overtakes nothing, came again."""

import pytest

from edge_client.lookout import LOOK_CAP_S, LOOK_S, LOOKS, Lookout

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
    return Lookout(broker, "s/round")


def test_what_is_missing_is_asked_for_when_the_announcement_came_again(lookout, broker):
    assert not lookout.found(FIRST, ())
    lookout.tick(LOOK_S, MODELS)
    assert broker.take() == []
    lookout.tick(LOOK_S + 0.1, MODELS)
    assert broker.take() == ["s/round"]
    assert lookout.found(FIRST, MODELS)
    assert broker.take() == list(MODELS)


def test_what_came_in_the_meantime_is_not(lookout, broker):
    """It was only slow."""
    lookout.found(FIRST, ())
    lookout.tick(9.0, MODELS)
    broker.take()
    assert lookout.found(FIRST, MODELS[1:])
    assert broker.take() == ["s/model/bb"]


def test_the_announcement_of_another_round_says_nothing_of_its_models(lookout, broker):
    """They were asked for just now."""
    lookout.found(FIRST, ())
    lookout.tick(9.0, MODELS)
    broker.take()
    assert not lookout.found(SECOND, MODELS)
    assert not lookout.found(SECOND, MODELS), "the copy that we asked for, before these models"
    assert broker.take() == []


def test_an_announcement_that_comes_again_by_itself_asks_for_nothing(lookout, broker):
    lookout.found(FIRST, ())
    assert not lookout.found(FIRST, MODELS)
    assert broker.take() == []


def test_as_long_as_anything_arrives_nothing_is_asked_for(lookout, broker):
    for second in range(100):
        lookout.heard(float(second))
        lookout.tick(second + 0.9, MODELS)
    assert broker.take() == []


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
    lookout.tick(301.0, ())
    lookout.tick(301.0 + LOOK_S + 0.1, MODELS)
    assert broker.take() == ["s/round"], "and begin anew"
