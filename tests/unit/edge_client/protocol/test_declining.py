"""Declines: which error gives which reason, and when a round is declined, once or again."""

from types import SimpleNamespace

import pytest

from crypto.seal.replay import ReplayWatermark
from edge_client.protocol.declining import Decliner, decline_reason
from shoal.errors import (
    ConfigError,
    DataError,
    DocumentError,
    IntegrityError,
    KeyMismatchError,
    NotEnrolledError,
    StorageError,
    TaskError,
    UntrustedError,
    WireError,
)
from shoal.protocol.messages import NO_ASSIGNMENT, DeclineReason
from tests.helpers.announced import announcement

RUN, OTHER_RUN = b"r" * 16, b"o" * 16
ERROR = DataError("line 3 of /home/ada/secret.csv")


class Notes:
    """Records the declines."""

    def __init__(self):
        self.sent = []

    def decline(self, announcement, reason):
        """Record a decline."""
        self.sent.append((announcement.nonce[:1].decode(), reason))


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def declining(notes):
    return Decliner(SimpleNamespace(index=0), notes)


def follow(declining, error=ERROR, newest=RUN):
    """Let the device fail to follow a run; return whether a round that was announced is to be declined."""
    announced = []
    with (
        pytest.raises(type(error)) as caught,
        declining.unless_followed(SimpleNamespace(newest=newest), lambda: announced.append(1)),
    ):
        raise error
    assert caught.value is error
    return bool(announced)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (StorageError, DeclineReason.DISK),
        (DataError, DeclineReason.DATA),
        (TaskError, DeclineReason.TASK),
        (UntrustedError, DeclineReason.REFUSED),
        (IntegrityError, DeclineReason.REFUSED),
        (WireError, DeclineReason.REFUSED),
        (DocumentError, DeclineReason.REFUSED),
        (KeyMismatchError, DeclineReason.REFUSED),
        (ConfigError, DeclineReason.OTHER),
        (NotEnrolledError, DeclineReason.OTHER),
    ],
)
def test_each_error_has_its_kind_of_reason(kind, reason):
    """A full disk is a ConfigError and missing data are a TaskError: the narrower kind counts."""
    assert decline_reason(kind("x")) is reason


def test_a_round_without_work_for_this_device_is_not_declined(declining, notes):
    for assignment_of in ((), (NO_ASSIGNMENT,), (NO_ASSIGNMENT, 0)):
        declining.decline(announcement(assignment_of=assignment_of), ERROR)
    assert notes.sent == []
    declining.again(announcement())
    assert notes.sent == [], "no decline was sent that could be repeated"


def test_an_announcement_of_a_run_that_could_not_be_followed_is_declined(declining, notes):
    declining.unfollowed(announcement())
    assert notes.sent == []
    assert follow(declining)
    declining.unfollowed(announcement(run_id=OTHER_RUN))
    assert notes.sent == []
    declining.unfollowed(announcement(nonce=b"a" * 16))
    declining.unfollowed(announcement(nonce=b"b" * 16))
    assert notes.sent == [("a", DeclineReason.DATA), ("b", DeclineReason.DATA)]


def test_a_run_that_fails_again_declines_no_round_twice(declining):
    """A package may be delivered again with every connection."""
    assert follow(declining)
    assert not follow(declining)
    assert follow(declining, newest=OTHER_RUN)


def test_the_newest_error_of_a_run_counts(declining, notes):
    follow(declining)
    follow(declining, TaskError("diverged"))
    declining.unfollowed(announcement())
    assert notes.sent == [("n", DeclineReason.TASK)]


def test_a_package_that_names_no_run_is_an_error_that_declines_nothing(declining, notes):
    assert not follow(declining, newest=b"")
    declining.unfollowed(announcement(run_id=RUN))
    assert notes.sent == []


def test_an_error_that_is_not_ours_passes_and_is_not_recorded(declining, notes):
    with pytest.raises(KeyError), declining.unless_followed(SimpleNamespace(newest=RUN), lambda: None):
        raise KeyError("bug")
    declining.unfollowed(announcement())
    assert notes.sent == []


def test_a_run_that_is_followed_at_last_clears_the_errors(declining, notes):
    follow(declining)
    declining.decline(announcement(), ERROR)
    declining.followed()
    declining.unfollowed(announcement())
    declining.again(announcement())
    assert len(notes.sent) == 1


@pytest.mark.parametrize(
    ("place", "declined"),
    [((1, 3), True), ((2, 1), True), ((1, 2), False), ((1, 1), False)],
)
def test_a_refused_announcement_is_declined_only_if_it_is_newer_than_the_watermark(declining, notes, place, declined):
    """A replayed one would otherwise make the device speak."""
    run, round_ = place
    mark = ReplayWatermark(roster=3, run=1, round=2, nonce=b"m" * 16)
    declining.refused(announcement(run=run, round=round_), UntrustedError("no"), mark)
    assert notes.sent == ([("n", DeclineReason.REFUSED)] if declined else [])


def test_the_last_declined_announcement_is_declined_again_when_it_comes_again(declining, notes):
    declining.decline(announcement(nonce=b"a" * 16), ERROR)
    declining.decline(announcement(nonce=b"b" * 16), TaskError("diverged"))
    declining.again(announcement(nonce=b"a" * 16))
    declining.again(announcement(nonce=b"c" * 16))
    declining.again(announcement(nonce=b"b" * 16))
    assert notes.sent == [("a", DeclineReason.DATA), ("b", DeclineReason.TASK), ("b", DeclineReason.TASK)]
