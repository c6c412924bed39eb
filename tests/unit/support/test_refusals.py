"""A refusal is told at once, and its repetitions now and then."""

import logging

from support.refusals import MOST_KNOWN, Refusals

LOG = logging.getLogger("shoal.test")


def told(caplog):
    return [r.kv for r in caplog.records]


def test_the_same_refusal_is_told_after_pauses_that_double(caplog):
    refusals = Refusals(LOG)
    times = []
    for second in range(0, 4 * 3600, 5):
        before = len(caplog.records)
        refusals.tell("s/round", "too old", "", float(second))
        if len(caplog.records) > before:
            times.append(second)
    assert times == [0, 60, 180, 420, 900, 1860, 3780, 7380, 10980]
    assert [f.get("times") for f in told(caplog)] == [None, 12, 24, 48, 96, 192, 384, 720, 720]


def test_what_is_new_is_told_at_once(caplog):
    refusals = Refusals(LOG)
    for topic, reason in (("a", "x"), ("a", "y"), ("b", "x"), ("a", "x")):
        refusals.tell(topic, reason, "look", 0.0)
    assert told(caplog) == [{"topic": t, "reason": r, "hint": "look"} for t, r in (("a", "x"), ("a", "y"), ("b", "x"))]


def test_whoever_varies_what_he_sends_takes_no_memory(caplog):
    refusals = Refusals(LOG)
    for number in range(3 * MOST_KNOWN):
        refusals.tell("a", f"reason {number}", "", 0.0)
    assert len(refusals._known) == MOST_KNOWN
