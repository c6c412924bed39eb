"""What a device says instead of an upload: that none will come, so that nobody waits for it, and in one word why.

The word is all that leaves the device. What exactly does not fit stands in its own log: an error's text may name files and
values.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from shoal.errors import DataError, IntegrityError, ShoalError, StorageError, TaskError, UntrustedError
from shoal.protocol.messages import DeclineReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from crypto.seal.replay import ReplayWatermark
    from edge_client.membership import DeviceMembership
    from edge_client.protocol.notes import ControlMessages
    from shoal.protocol.messages import Announcement


class Follower(Protocol):
    """Opens run packages, as `edge_client.run.following.RunFollower` does."""

    newest: bytes


def decline_reason(error: ShoalError) -> DeclineReason:
    """Return the word for an error."""
    match error:
        case StorageError():
            return DeclineReason.DISK
        case DataError():
            return DeclineReason.DATA
        case TaskError():
            return DeclineReason.TASK
        case UntrustedError() | IntegrityError():
            return DeclineReason.REFUSED
        case _:
            return DeclineReason.OTHER


class Decliner:
    """Tells the aggregator that a device can't do its part, once for each time that it is asked."""

    def __init__(self, membership: DeviceMembership, notes: ControlMessages) -> None:
        self._membership = membership
        self._notes = notes
        self._refused: tuple[bytes, ShoalError] | None = None
        self._last: tuple[bytes, ShoalError] | None = None

    @contextmanager
    def unless_followed(self, following: Follower, announced: Callable[[], None]) -> Iterator[None]:
        """Note why the run that ``following`` opens in the body can't be followed, if so, and look at what was ``announced``."""
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
        """Forget what stood in the way: a run is followed."""
        self._refused = self._last = None

    def unfollowed(self, announcement: Announcement) -> None:
        """Take an announcement of a run that is not followed: decline it if that is because the run can't be."""
        if self._refused is not None and self._refused[0] == announcement.run_id:
            self.decline(announcement, self._refused[1])

    def refused(self, announcement: Announcement, error: ShoalError, mark: ReplayWatermark) -> None:
        """Take an announcement that was refused: decline it, unless it is an old one, beyond which the device's ``mark`` is."""
        if announcement.place > mark.place:
            self.decline(announcement, error)

    def again(self, announcement: Announcement) -> None:
        """Take an announcement of the run: decline it again if it was declined, for an aggregator that was started again."""
        if self._last is not None and self._last[0] == announcement.nonce:
            self.decline(announcement, self._last[1])

    def decline(self, announcement: Announcement, error: ShoalError) -> None:
        """Say that no upload will come for an announcement, unless none was asked for."""
        if announcement.order_for(self._membership.index) is None:
            return
        self._last = announcement.nonce, error
        self._notes.decline(announcement, decline_reason(error))
