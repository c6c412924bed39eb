"""Asking the broker again for what it retains, and never for what may still be on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shoal.transport.base import resubscribe

if TYPE_CHECKING:
    from shoal.transport.base import Transport

LOOK_S: Final = 5.0
"""A device that waits for something and has heard nothing for this long looks whether it was lost; then twice as long."""
LOOK_CAP_S: Final = 60.0
LOOK_LATEST_S: Final = 120.0
"""Whatever it hears, it looks as often as this: what it hears may be anybody's."""
LOOKS: Final = 4
"""After so many without hearing anything the announcement may be lost as well: everything is asked for."""


class Resync:
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
        self._missing: tuple[str, ...] = ()
        self._heard_s = self._looked_s = 0.0
        self._looks = self._silent = 0
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
        self._heard_s, self._silent = now_s, 0

    def tick(self, now_s: float, missing: tuple[str, ...]) -> None:
        """Look after what lies below the ``missing`` topics if nothing was heard for long enough."""
        if missing != self._missing:
            self._missing, self._looked_s, self._looks, self._silent = missing, now_s, 0, 0
        silence_s = now_s - max(self._heard_s, self._looked_s)
        pause_s = min(LOOK_CAP_S, LOOK_S * 2.0**self._looks)
        if missing and (silence_s > pause_s or now_s - self._looked_s > LOOK_LATEST_S):
            if self._silent >= LOOKS:
                self.look(*missing)
            self.ask()
            self._looked_s, self._looks, self._silent = now_s, self._looks + 1, self._silent + 1

    def found(self, nonce: bytes, missing: tuple[str, ...]) -> bool:
        """Take an announcement's nonce; return whether it is the one before, which we asked for.

        Then what is ``missing`` still is asked for.
        """
        asked = self._asked and nonce == self._nonce
        if asked:
            self.look(*missing)
        self._nonce, self._asked = nonce, False
        return asked
