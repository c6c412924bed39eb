"""Re-subscribe to retained topics whose messages were lost, without re-requesting any still in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shoal.transport.base import resubscribe

if TYPE_CHECKING:
    from shoal.transport.base import Transport

LOOK_S: Final = 5.0
"""A device that waits for messages and has received none for this long re-requests the announcement; then after twice as long."""
LOOK_CAP_S: Final = 60.0
LOOK_LATEST_S: Final = 120.0
"""Longest pause between two requests, even if messages arrive: they may not be the missing ones."""
LOOKS: Final = 4
"""After this many requests without any message the announcement may be lost as well, so all missing topics are re-requested."""


class Resync:
    """Detects lost messages and re-requests them.

    A broker sends in order. So the device first re-requests the announcement, which is short. When that arrives, messages
    that are still missing are lost, even on a slow link, and the device re-requests them.

    Args:
        transport: the device's subscriptions.
        announcement: base topic of announcements.
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
        """Have the broker send the retained messages below these topics again."""
        for base in bases:
            resubscribe(self._transport, f"{base}/#")

    def ask(self) -> None:
        """Re-request the announcement; when it arrives, `found` re-requests the missing messages."""
        self._asked = True
        self.look(self._announcement)

    def heard(self, now_s: float) -> None:
        """Record that a message arrived at ``now_s``."""
        self._heard_s, self._silent = now_s, 0

    def tick(self, now_s: float, missing: tuple[str, ...]) -> None:
        """Re-request the announcement if messages are ``missing`` and none has arrived for long enough."""
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
        """Take an announcement's nonce; return whether it repeats the last one because we re-requested it.

        In that case re-request the topics that are still ``missing``.
        """
        asked = self._asked and nonce == self._nonce
        if asked:
            self.look(*missing)
        self._nonce, self._asked = nonce, False
        return asked
