"""The file ``requests.count`` in the owner's directory: the number of the last request to the aggregator.

A number is taken under the fleet's lock and durable before its request is sent, so that no two requests share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shoal.errors import ConfigError, IntegrityError
from shoal.owner.keys.vault import BACKUP_HINT
from shoal.util.files import read_if_there, write_private

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory

COUNT_FILE: Final = "requests.count"
MOST: Final = (1 << 63) - 1
MOST_AHEAD: Final = 1 << 32
"""Largest jump of the number: an aggregator that cheats can't use the numbers up."""
RESTORED_HINT: Final = (
    "the directory was restored from a backup, or two copies of it are in use: end the other copy. Then run this again: requests "
    "go on from the aggregator's number now"
)


class RequestNumbers:
    """The numbers of one fleet's requests."""

    def __init__(self, fleet: FleetDirectory) -> None:
        self._fleet = fleet
        self._path = fleet.path / COUNT_FILE

    def last(self) -> int:
        """Return the last number taken, 0 before the first.

        Raises:
            IntegrityError: the file is damaged.
        """
        data = read_if_there(self._path)
        if data is None:
            return 0
        if not data.isascii() or not data.isdigit() or not int(data) <= MOST:
            raise IntegrityError(f"{self._path} is damaged", hint=BACKUP_HINT)
        return int(data)

    def take(self) -> int:
        """Take the next number, durably.

        Raises:
            ConfigError: another `shoal-fleet` has the directory locked for too long, or the disk fails.
        """
        with self._fleet.changing():
            number = self.last() + 1
            write_private(self._path, str(number).encode())
        return number

    def count_on(self, accepted: int) -> None:
        """Go on from ``accepted``, the highest number that the aggregator has seen, if it is above ours.

        Raises:
            ConfigError: it was above ours: this directory is older than a request of its owner.
        """
        with self._fleet.changing():
            ours = self.last()
            if accepted <= ours:
                return
            if accepted - ours <= MOST_AHEAD:
                write_private(self._path, str(accepted).encode())
        raise ConfigError(
            f"the aggregator has seen request {accepted} of this owner, and this directory has made {ours}",
            hint=RESTORED_HINT,
        )
