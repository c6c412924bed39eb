"""A new refusal is logged at once, its repetitions after growing pauses."""

import logging

from shoal.errors import ShoalError
from shoal.util.log_throttle import FIRST_PAUSE_S, MOST_CHARS, MOST_KNOWN, TOO_MANY, Refusals

LOG = logging.getLogger("shoal.test")


def told(caplog):
    return [r.kv for r in caplog.records]


def test_same_refusal_after_doubling_pauses(caplog):
    """The same refusal is told after pauses that double."""
    refusals = Refusals(LOG)
    times = []
    for second in range(0, 4 * 3600, 5):
        before = len(caplog.records)
        refusals.tell("s/round", ShoalError("too old"), float(second))
        if len(caplog.records) > before:
            times.append(second)
    assert times == [0, 60, 180, 420, 900, 1860, 3780, 7380, 10980]
    assert [f.get("times") for f in told(caplog)] == [None, 12, 24, 48, 96, 192, 384, 720, 720]


def test_what_is_new_is_told_at_once(caplog):
    refusals = Refusals(LOG)
    for topic, reason in (("a", "x"), ("a", "y"), ("b", "x"), ("a", "x")):
        refusals.tell(topic, ShoalError(reason, hint="look"), 0.0)
    assert told(caplog) == [{"topic": t, "reason": r, "hint": "look"} for t, r in (("a", "x"), ("a", "y"), ("b", "x"))]


def test_many_refusals_take_little(caplog):
    """A stranger chooses the topics: each message can be a refusal that was never seen before."""
    refusals = Refusals(LOG)
    for number in range(20 * MOST_KNOWN):
        refusals.tell(f"s/{number}", ShoalError("unknown device"), number / 1000)
    assert len(refusals._known) <= MOST_KNOWN + 1
    lines = told(caplog)
    assert len(lines) == MOST_KNOWN + 1
    assert lines[-1]["reason"] == TOO_MANY
    refusals.tell("new", ShoalError("seen once the old ones may be forgotten"), 2 * FIRST_PAUSE_S)
    assert told(caplog)[-1]["topic"] == "new"


def test_a_long_topic_or_reason_is_cut(caplog):
    refusals = Refusals(LOG)
    refusals.tell("t" * 65_535, ShoalError("r" * 65_535), 0.0)
    ((topic, reason),) = refusals._known
    assert (len(topic), len(reason)) == (MOST_CHARS, MOST_CHARS)
    assert told(caplog) == [{"topic": topic, "reason": reason}]
