"""Declining a round: a short message with the kind of reason, so that the aggregator does not wait for an upload.

Only the kind of reason leaves the device. The error itself is written to the device's own log, since its text may name files
and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from edge_client.protocol.session_io import SendDecline
from shoal.errors import (
    DataError,
    IntegrityError,
    MeteredError,
    MissingStateError,
    NoSumError,
    ReplacedKeysError,
    ShoalError,
    StorageError,
    TaskError,
    TrainerError,
    UntrustedError,
)
from shoal.protocol.messages import Announcement, DeclineReason

Step = tuple["Declines", tuple[SendDecline, ...]]


_REASONS: Final = (
    (StorageError, DeclineReason.DISK),
    (DataError, DeclineReason.DATA),
    (TrainerError, DeclineReason.TRAINER),
    (TaskError, DeclineReason.TASK),
    (NoSumError, DeclineReason.SUM),
    (MissingStateError, DeclineReason.STATE),
    (ReplacedKeysError, DeclineReason.KEYS),
    (MeteredError, DeclineReason.METERED),
    (UntrustedError, DeclineReason.REFUSED),
    (IntegrityError, DeclineReason.REFUSED),
)
"""The kind of reason of each class of errors; the first that fits counts, so a class stands before those that it derives from."""


def decline_reason(error: ShoalError) -> DeclineReason:
    """Map an error to the kind of reason that a decline carries."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), DeclineReason.OTHER)


@dataclass(frozen=True, slots=True)
class Declines:
    """The declines of one device: one for each announcement of a round that it can't take part in.

    Attributes:
        index: the device's index in the roster.
        unfollowed: id of a run that the device could not follow, and the reason; None if absent.
        last: nonce of the last declined announcement, the reason, and the model of `Decline`; None if absent.
    """

    index: int
    unfollowed: tuple[bytes, DeclineReason] | None = None
    last: tuple[bytes, DeclineReason, int] | None = None

    def run_refused(self, run_id: bytes, reason: DeclineReason) -> tuple[Declines, bool]:
        """Record that a run can't be followed; return also whether it had not failed before."""
        if not run_id:
            return self, False
        new = self.unfollowed is None or self.unfollowed[0] != run_id
        return replace(self, unfollowed=(run_id, reason)), new

    def followed(self) -> Declines:
        """Return the state once the device follows a run."""
        return Declines(self.index)

    def unable_to_follow(self, announcement: Announcement) -> Step:
        """Decline an announcement of the run that the device could not follow; do nothing for any other run."""
        if self.unfollowed is None or self.unfollowed[0] != announcement.run_id:
            return self, ()
        return self.decline(announcement, self.unfollowed[1])

    def again(self, announcement: Announcement) -> Step:
        """Decline an announcement again if it was declined before: the aggregator may have restarted."""
        if self.last is None or self.last[0] != announcement.nonce:
            return self, ()
        return self.decline(announcement, *self.last[1:])

    def decline(self, announcement: Announcement, reason: DeclineReason, model: int = 0) -> Step:
        """Decline an announcement, if it has an assignment for this device."""
        if announcement.order_for(self.index) is None:
            return self, ()
        last = announcement.nonce, reason, model
        return replace(self, last=last), (SendDecline(announcement, reason, model),)
