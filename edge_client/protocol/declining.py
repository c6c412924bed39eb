"""Declining a round: a short message with the kind of reason, so that the aggregator does not wait for an upload.

Only the kind of reason leaves the device. The error itself is written to the device's own log, since its text may name files
and values.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from shoal.errors import (
    DataError,
    IntegrityError,
    MissingStateError,
    ReplacedKeysError,
    ShoalError,
    StorageError,
    TaskError,
    UntrustedError,
)
from shoal.protocol.messages import DeclineReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from crypto.seal.replay import ReplayWatermark
    from edge_client.membership import DeviceMembership
    from edge_client.protocol.notes import ControlMessages
    from shoal.protocol.messages import Announcement


class Follower(Protocol):
    """Opens run packages; `edge_client.run.following.RunFollower` implements it."""

    newest: bytes


def decline_reason(error: ShoalError) -> DeclineReason:
    """Map an error to the kind of reason that a decline carries."""
    match error:
        case StorageError():
            return DeclineReason.DISK
        case DataError():
            return DeclineReason.DATA
        case TaskError():
            return DeclineReason.TASK
        case MissingStateError():
            return DeclineReason.STATE
        case ReplacedKeysError():
            return DeclineReason.KEYS
        case UntrustedError() | IntegrityError():
            return DeclineReason.REFUSED
        case _:
            return DeclineReason.OTHER


class Decliner:
    """Sends one decline for each announcement of a round that the device can't take part in."""

    def __init__(self, membership: DeviceMembership, notes: ControlMessages) -> None:
        self._membership = membership
        self._notes = notes
        self._refused: tuple[bytes, ShoalError] | None = None
        self._last: tuple[bytes, ShoalError] | None = None

    @contextmanager
    def unless_followed(self, following: Follower, announced: Callable[[], None]) -> Iterator[None]:
        """Record the error if the body can't follow the run that ``following`` opens, and re-raise it.

        For a run that had not failed before, call ``announced`` first, which declines a round that is already announced.
        """
        try:
            yield
        except ShoalError as error:
            new = self._refused is None or self._refused[0] != following.newest
            if following.newest:
                self._refused = following.newest, error
                if new:
                    announced()
            raise

    def followed(self) -> None:
        """Clear the recorded errors: the device follows a run."""
        self._refused = self._last = None

    def unfollowed(self, announcement: Announcement) -> None:
        """Decline an announcement of a run that the device could not follow; do nothing for any other run."""
        if self._refused is not None and self._refused[0] == announcement.run_id:
            self.decline(announcement, self._refused[1])

    def refused(self, announcement: Announcement, error: ShoalError, mark: ReplayWatermark) -> None:
        """Decline an announcement that the policy refused, unless it is not newer than the device's watermark ``mark``."""
        if announcement.place > mark.place:
            self.decline(announcement, error)

    def again(self, announcement: Announcement) -> None:
        """Decline an announcement again if it was declined before: the aggregator may have restarted."""
        if self._last is not None and self._last[0] == announcement.nonce:
            self.decline(announcement, self._last[1])

    def decline(self, announcement: Announcement, error: ShoalError) -> None:
        """Send a decline for an announcement, if it has an assignment for this device."""
        if announcement.order_for(self._membership.index) is None:
            return
        self._last = announcement.nonce, error
        self._notes.decline(announcement, decline_reason(error))
