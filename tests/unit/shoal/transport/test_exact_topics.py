"""Retained messages of a broker that sends none to filters with wildcards are requested topic by topic."""

import pytest

from shoal.transport.exact_topics import ExactTopics


@pytest.fixture
def exact():
    return ExactTopics()


def test_repeated_filter_goes_chunk_by_chunk(exact):
    """A filter that is asked for again is requested chunk by chunk."""
    assert exact.requested("s/plan/#", again=False) == []
    assert exact.requested("s/plan/#", again=True) == [("s/plan", True), ("s/plan/0", True)]
    assert exact.arrived("s/plan/0") == [("s/plan/1", True)]
    assert exact.arrived("s/plan/1") == [("s/plan/2", True)]
    assert exact.needed
    assert exact.requested("s/model/9/#", again=False) == [("s/model/9", True), ("s/model/9/0", True)], "at once now"
    assert exact.arrived("s/model/9") == [], "one chunk, at the base, whose name is no number of a chunk"
    assert exact.dropped("s/plan/#") == [(f"s/plan{end}", False) for end in ("", "/0", "/1", "/2")]


@pytest.mark.parametrize("topic_filter", ["s/notice", "d/+/state", "w/+/part/#"])
def test_other_filters_have_no_exact_topics(topic_filter):
    assert ExactTopics().requested(topic_filter, again=True) == []


def test_broker_with_wildcards_is_not_asked(exact):
    """It answers the filter and the topic, so a second copy of one request shows it."""
    exact.requested("s/round/#", again=True)
    assert exact.arrived("s/round") == []
    assert exact.arrived("s/round") == [("s/round", False), ("s/round/0", False)]
    assert exact.served
    assert exact.requested("s/round/#", again=True) == exact.arrived("s/round") == []


def test_two_requests_may_have_two_answers(exact):
    """Two copies of one topic show nothing if it was requested twice, nor does an answer to a filter without wildcards."""
    assert exact.requested("s/notice", again=False) == exact.arrived("s/notice") == []
    for _ in range(2):
        exact.requested("s/round/#", again=True)
    exact.arrived("s/round")
    exact.arrived("s/round")
    assert exact.needed
    assert not exact.served
    other = ExactTopics()
    assert other.arrived("s/keys/dev-1") == []
    assert other.served, "nobody has requested it by its topic"
