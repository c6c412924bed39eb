"""Asking the broker again for what it retains, and never for what may still be on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from wire.transport import resubscribe

if TYPE_CHECKING:
    from wire.transport import Transport

LOOK_S: Final = 5.0
"""A device that waits for something and has heard nothing for this long looks whether it was lost; then twice as long."""
LOOK_CAP_S: Final = 60.0
LOOKS: Final = 4
"""After so many in vain, and two minutes of silence, the announcement may be lost as well: everything is asked for."""


class Lookout:
    """Looks for what a device misses.

    A broker sends in order. So the device first asks for the announcement again, which is short: what has not come before
    it is lost, however slow the link, and is asked for then.

    Args:
        transport: subscribes.
        announcement: base of the topics of announcements.
    """

    def __init__(self, transport: Transport, announcement: str) -> None:
        self._transport = transport
        self._announcement = announcement
        self._since_s = 0.0
        self._looks = 0
        self._asked = False
        self._nonce = b""

    def look(self, *bases: str) -> None:
        """Have the broker send once more what it retains below these topics."""
        for base in bases:
            resubscribe(self._transport, f"{base}/#")

    def ask(self) -> None:
        """Ask for the announcement, and for what is missing then."""
        self._asked = True
        self.look(self._announcement)

    def heard(self, now_s: float) -> None:
        """Take note that something arrived."""
        self._since_s, self._looks = now_s, 0

    def tick(self, now_s: float, missing: tuple[str, ...]) -> None:
        """Look after what lies below the ``missing`` topics if nothing was heard for long enough."""
        if not missing:
            self._looks = 0
        elif now_s - self._since_s > min(LOOK_CAP_S, LOOK_S * 2.0**self._looks):
            if self._looks >= LOOKS:
                self.look(*missing)
            self.ask()
            self._since_s, self._looks = now_s, self._looks + 1

    def found(self, nonce: bytes, missing: tuple[str, ...]) -> bool:
        """Take an announcement's nonce; return whether it is the one before, which we asked for.

        Then what is ``missing`` still is asked for.
        """
        asked = self._asked and nonce == self._nonce
        if asked:
            self.look(*missing)
        self._nonce, self._asked = nonce, False
        return asked
