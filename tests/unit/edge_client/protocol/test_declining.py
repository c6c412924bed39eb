"""Declines: which error gives which reason, and when a round is declined, once or again."""

import pytest

from edge_client.protocol.declining import Declines, decline_reason
from shoal.errors import (
    ConfigError,
    DataError,
    DocumentError,
    IntegrityError,
    KeyMismatchError,
    MeteredError,
    MissingStateError,
    NotEnrolledError,
    ReplacedKeysError,
    StorageError,
    TaskError,
    UntrustedError,
    WireError,
)
from shoal.protocol.messages import NO_ASSIGNMENT, DeclineReason
from tests.helpers.announced import announcement

RUN, OTHER_RUN = b"r" * 16, b"o" * 16
DATA = DeclineReason.DATA


class Declining:
    """Holds the state, and collects (first byte of the nonce, reason) of each decline."""

    def __init__(self):
        self.state, self.sent = Declines(0), []

    def go(self, step):
        self.state, done = step
        self.sent += [(action.announcement.nonce[:1].decode(), action.reason) for action in done]

    def decline(self, announced, reason=DATA):
        self.go(self.state.decline(announced, reason))

    def again(self, announced):
        self.go(self.state.again(announced))

    def unfollowed(self, announced):
        self.go(self.state.unable_to_follow(announced))

    def fail(self, reason=DATA, run_id=RUN):
        """Let the device fail to follow a run; return whether a round that was announced is to be declined."""
        self.state, new = self.state.run_refused(run_id, reason)
        return new


@pytest.fixture
def declining():
    return Declining()


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
        (MissingStateError, DeclineReason.STATE),
        (ReplacedKeysError, DeclineReason.KEYS),
        (MeteredError, DeclineReason.METERED),
    ],
)
def test_each_error_has_its_kind_of_reason(kind, reason):
    """A full disk is a ConfigError and missing data are a TaskError: the narrower kind counts."""
    assert decline_reason(kind("x")) is reason


def test_round_without_work_is_not_declined(declining):
    """A round without work for this device is not declined."""
    for assignment_of in ((), (NO_ASSIGNMENT,), (NO_ASSIGNMENT, 0)):
        declining.decline(announcement(assignment_of=assignment_of))
    assert declining.sent == []
    declining.again(announcement())
    assert declining.sent == [], "no decline was sent that could be repeated"


def test_unfollowed_run_is_declined(declining):
    """An announcement of a run that could not be followed is declined."""
    declining.unfollowed(announcement())
    assert declining.sent == []
    assert declining.fail()
    declining.unfollowed(announcement(run_id=OTHER_RUN))
    assert declining.sent == []
    declining.unfollowed(announcement(nonce=b"a" * 16))
    declining.unfollowed(announcement(nonce=b"b" * 16))
    assert declining.sent == [("a", DATA), ("b", DATA)]


def test_newest_error_of_a_run_is_sent_once(declining):
    """A package may be delivered again with every connection; one that names no run is an error that declines nothing."""
    assert not declining.fail(run_id=b"")
    declining.unfollowed(announcement(run_id=RUN))
    assert declining.sent == []
    assert declining.fail()
    assert not declining.fail(DeclineReason.TASK)
    declining.unfollowed(announcement())
    assert declining.sent == [("n", DeclineReason.TASK)]
    assert declining.fail(run_id=OTHER_RUN)


def test_followed_run_clears_the_errors(declining):
    """A run that is followed at last clears the errors."""
    declining.fail()
    declining.decline(announcement())
    declining.state = declining.state.followed()
    declining.unfollowed(announcement())
    declining.again(announcement())
    assert len(declining.sent) == 1


def test_last_decline_is_repeated(declining):
    """The last declined announcement is declined again when it comes again."""
    declining.decline(announcement(nonce=b"a" * 16))
    declining.decline(announcement(nonce=b"b" * 16), DeclineReason.TASK)
    declining.again(announcement(nonce=b"a" * 16))
    declining.again(announcement(nonce=b"c" * 16))
    declining.again(announcement(nonce=b"b" * 16))
    assert declining.sent == [("a", DATA), ("b", DeclineReason.TASK), ("b", DeclineReason.TASK)]
