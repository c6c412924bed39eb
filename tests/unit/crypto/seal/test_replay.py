"""The high-water mark: rosters, runs, rounds and the steps of rollovers only go up."""

import dataclasses

import pytest

from crypto.seal.replay import ReplayWatermark
from shoal.errors import UntrustedError
from shoal.protocol.messages import Announcement

AT = ReplayWatermark(roster=5, run=2, round=3, nonce=b"n" * 16, step=2)


def announced(run=2, round_=3, step=2, nonce=b"n" * 16, roster=5):
    return Announcement(
        fleet="demo",
        run=run,
        run_id=b"r" * 16,
        epoch=1,
        key_id=b"k" * 16,
        roster_sequence=roster,
        round=round_,
        nonce=nonce,
        deadline_s=60.0,
        finished=False,
        models=(),
        assignments=(),
        assignment_of=(),
        mode="permutation",
        step=step,
    )


@pytest.mark.parametrize(
    "place",
    [
        (2, 3, 3),
        (2, 3, 300),
        (2, 4, 0),
        (2, 4, 1),
        (2, 9, 0),
        (3, 1, 0),
        (3, 0, 1),
        (3, 0, 2),
    ],
)
def test_whatever_comes_later_is_accepted(place):
    """A step after its round, a round after the steps before it, a run from its beginning."""
    run, round_, step = place
    found = AT.accept(announced(run, round_, step, nonce=b"m" * 16, roster=6))
    assert found == ReplayWatermark(6, run, round_, b"m" * 16, step)
    assert found.place == place


@pytest.mark.parametrize("place", [(2, 3, 1), (2, 3, 0), (2, 2, 9), (2, 2, 0), (1, 9, 9), (1, 3, 2)])
def test_whatever_came_before_is_refused(place):
    run, round_, step = place
    with pytest.raises(UntrustedError, match="announced after run 2 round 3"):
        AT.accept(announced(run, round_, step, nonce=b"m" * 16))


def test_the_same_step_again_is_the_same_step():
    """The aggregator restarted."""
    assert AT.accept(announced()) == AT
    assert AT.accept(announced(roster=7)).roster == 7


def test_the_same_step_is_not_announced_twice_differently():
    with pytest.raises(UntrustedError, match="announced twice, differently"):
        AT.accept(announced(nonce=b"m" * 16))


def test_an_older_roster_is_refused_wherever_it_comes():
    with pytest.raises(UntrustedError, match="under roster 4 after 5"):
        AT.accept(announced(round_=9, roster=4))


def test_a_new_device_accepts_the_first_thing():
    """Also a rollover before round 1, if a device was revoked before the run began."""
    assert ReplayWatermark().accept(announced(1, 0, 1)).place == (1, 0, 1)
    assert dataclasses.replace(ReplayWatermark(), roster=1).accept(announced(1, 1, 0)).place == (1, 1, 0)
