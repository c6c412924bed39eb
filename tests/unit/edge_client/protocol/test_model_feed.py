"""Subscriptions to means and checkpoints: exactly those of the current assignment."""

from edge_client.protocol.model_feed import ModelFeed
from tests.helpers.parties import TOPICS, Line


class Models:
    """A store of models that records what is dropped."""

    def __init__(self):
        self.dropped = []

    def drop(self, label):
        """Record a label."""
        self.dropped.append(label)


def filters(*labels):
    return [f"{TOPICS.model(label)}/#" for label in labels]


def test_only_what_changes_is_subscribed_and_what_is_left_is_dropped_from_the_store():
    line, models = Line(), Models()
    feed = ModelFeed(line, TOPICS)
    feed.follow(("a1", "b2"), models)
    assert (line.filters, line.dropped, models.dropped) == (filters("a1", "b2"), [], [])
    feed.follow(("b2", "c3"), models)
    assert line.filters == filters("a1", "b2", "c3")
    assert line.dropped == filters("a1")
    assert models.dropped == ["a1"]
    assert feed.bases == (TOPICS.model("b2"), TOPICS.model("c3"))


def test_the_same_models_again_cause_no_message():
    line = Line()
    feed = ModelFeed(line, TOPICS)
    feed.follow(("a1",), None)
    feed.follow(("a1",), None)
    assert (len(line.filters), line.dropped) == (1, [])


def test_without_a_run_there_is_no_store_to_drop_from():
    line = Line()
    feed = ModelFeed(line, TOPICS)
    feed.follow(("a1",), None)
    feed.follow((), None)
    assert line.dropped == filters("a1")
    assert feed.bases == ()


def test_a_model_that_is_needed_again_is_subscribed_again():
    """The broker then sends its retained message once more."""
    line = Line()
    feed = ModelFeed(line, TOPICS)
    for labels in (("a1",), (), ("a1",)):
        feed.follow(labels, None)
    assert line.filters == filters("a1", "a1")
