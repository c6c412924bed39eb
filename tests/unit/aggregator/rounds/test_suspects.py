"""The search for who spoils sums: halves, cleared devices, and a group of at least three in the end."""

from __future__ import annotations

import random

import pytest

from aggregator.rounds.suspects import GROUP_OUT, SEARCHED, SPOILT, Suspects, judged

NAMES = tuple(f"dev-{at:02}" for at in range(40))


def after(known, round_=1, **facts):
    return judged(known, round_, **{"spoilt": {}, "opened": {}, "refused": (), "used": (), **facts})


def search(liars, count, seed, *, late):
    """Return what the search ends with, and its rounds; ``late``: sums are found to be spoilt in the round after."""
    rng, known, events, pending = random.Random(seed), Suspects(), [], False
    for round_ in range(1, 40):
        out = known.left_out(rng.randbytes(16))
        cell = tuple(name for name in NAMES[:count] if name not in out)
        bad = bool(set(liars) & set(cell))
        if late:
            facts = {"refused": [0] if pending else [], "used": [] if pending else [0]}
            # Devices that have refused a mean send no update in that round.
            known, found = after(known, round_, opened={} if pending else {0: cell}, **facts)
            pending = bad and not pending
        else:
            known, found = after(
                known, round_, spoilt={0: cell} if bad else {}, opened={} if bad else {0: cell}, used=[0]
            )
        events += found
        if known.out and not known.suspects:
            return known, round_, events
    raise AssertionError("no end")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("count", [6, 7, 12, 20, 40])
def test_one_is_found_among_few(count, late):
    for seed in range(10):
        liar = NAMES[seed % count]
        known, rounds, events = search([liar], count, seed, late=late)
        assert liar in known.out
        assert 3 <= len(known.out) < SEARCHED
        assert rounds <= 16
        assert [e.kind for e in events].count(GROUP_OUT) == 1
        assert not known.left_out(b"n") - set(known.out)


def test_few_are_not_searched():
    known, (event,) = after(Suspects(), spoilt={3: NAMES[:5]})
    assert known.suspects == ()
    assert (event.kind, event.detail["cluster"]) == (SPOILT, 3)
    assert "can't be searched" in event.detail["reason"]


def test_who_stops_is_cleared():
    known, _ = after(Suspects(), spoilt={0: NAMES[:12]})
    for round_ in range(2, 12):
        out = known.left_out(bytes([round_]))
        cell = tuple(name for name in NAMES[:12] if name not in out)
        known, events = after(known, round_, opened={0: cell}, used=[0])
    assert known.suspects == ()
    assert all(event.kind == GROUP_OUT for event in events)


def test_a_suspect_who_changes_clusters():
    known, _ = after(Suspects(), spoilt={0: NAMES[:12]})
    found, (event, _) = after(known, spoilt={1: (*NAMES[:4], *NAMES[20:30])})
    assert event.detail["devices"] == list(NAMES[:4])
    assert found.out == NAMES[:4]


def test_clusters_are_searched_apart():
    known, _ = after(Suspects(), spoilt={0: NAMES[:12], 1: NAMES[12:24]})
    out = known.left_out(b"n")
    assert len(out & set(NAMES[:12])) == len(out & set(NAMES[12:24])) == 6


def test_spoilt_by_one_who_is_out_already():
    assert after(Suspects(opened={0: NAMES[:12]}, out=NAMES[:3]), refused=[0])[0].suspects == ()


def test_fewer_than_three_are_never_named():
    found, _ = after(Suspects(suspects=(NAMES[:6],)), spoilt={0: (*NAMES[4:6], *NAMES[10:14])})
    assert found.suspects == (NAMES[:6],)
