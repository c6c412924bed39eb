"""The high-water mark: rosters, runs and rounds only go up."""

import dataclasses

import pytest

from crypto.seal.replay import ReplayWatermark
from shoal.errors import UntrustedError
from tests.helpers.announced import announcement

AT = ReplayWatermark(roster=5, run=2, round=3, nonce=b"n" * 16)


def announced(run=2, round_=3, nonce=b"n" * 16, roster=5):
    return announcement(run=run, round=round_, nonce=nonce, roster_sequence=roster)


@pytest.mark.parametrize("place", [(2, 4), (2, 9), (3, 1), (3, 0)])
def test_whatever_comes_later_is_accepted(place):
    """A round after the one before, a run from its beginning."""
    run, round_ = place
    found = AT.accept(announced(run, round_, nonce=b"m" * 16, roster=6))
    assert (found, found.place) == (ReplayWatermark(6, run, round_, b"m" * 16), place)


@pytest.mark.parametrize("place", [(2, 2), (2, 0), (1, 9), (1, 3)])
def test_whatever_came_before_is_refused(place):
    run, round_ = place
    with pytest.raises(UntrustedError, match="announced after run 2 round 3"):
        AT.accept(announced(run, round_, nonce=b"m" * 16))


def test_same_round_again_is_the_same_round():
    """The aggregator restarted."""
    assert AT.accept(announced()) == AT
    assert AT.accept(announced(roster=7)).roster == 7


def test_no_round_is_announced_differently():
    """The same round is not announced twice differently."""
    with pytest.raises(UntrustedError, match="announced twice, differently"):
        AT.accept(announced(nonce=b"m" * 16))


def test_older_roster_is_refused_anywhere():
    """An older roster is refused wherever it comes."""
    with pytest.raises(UntrustedError, match="under roster 4 after 5"):
        AT.accept(announced(round_=9, roster=4))


def test_new_device_accepts_the_first_thing():
    """Also a round in the middle of a run."""
    assert ReplayWatermark().accept(announced(1, 7)).place == (1, 7)
    assert dataclasses.replace(ReplayWatermark(), roster=1).accept(announced(1, 1)).place == (1, 1)
