"""Re-subscribe to retained topics whose messages were lost, without re-requesting any still in flight.

A broker sends in order. So the device first re-requests the announcement, which is short. When that arrives, messages that
are still missing are lost, even on a slow link, and the device re-requests them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from edge_client.protocol.session_io import Resubscribe
from shoal.protocol.topics import TopicKind

LOOK_S: Final = 5.0
"""A device that waits for messages and has received none for this long re-requests the announcement; then after twice as long."""
LOOK_CAP_S: Final = 60.0
LOOK_LATEST_S: Final = 120.0
"""Longest pause between two requests, even if messages arrive: they may not be the missing ones."""
HEARD_STEP_S: Final = 0.1
"""Exactness of the time of the last message: it is noted so often that a new state for each chunk costs a large model's device
more than all its decisions."""
LOOKS: Final = 4
"""After this many requests without any message the announcement may be lost as well, so all missing topics are re-requested."""

Missing = tuple[Resubscribe, ...]
"""Retained messages that the device waits for, as the requests for them."""
Step = tuple["Resync", tuple[Resubscribe, ...]]


@dataclass(frozen=True, slots=True)
class Resync:
    """Detects lost messages and re-requests them.

    Attributes:
        missing: the messages that the device waited for at the last tick.
        heard_s: time of the last message; looked_s: of the last request, or of the change of ``missing``.
        looks: requests for them so far; silent: those since the last message.
        asked: the announcement was re-requested and has not come; nonce: of the last announcement.
    """

    missing: Missing = ()
    heard_s: float = 0.0
    looked_s: float = 0.0
    looks: int = 0
    silent: int = 0
    asked: bool = False
    nonce: bytes = b""

    def asking(self) -> Step:
        """Re-request the announcement; when it arrives, `announced` re-requests the missing messages."""
        return replace(self, asked=True), (Resubscribe(TopicKind.ROUND),)

    def heard(self, now_s: float) -> Resync:
        """Return the state after a message at ``now_s``; the chunks of a large message within HEARD_STEP_S count as one."""
        if not self.silent and 0.0 <= now_s - self.heard_s < HEARD_STEP_S:
            return self
        return replace(self, heard_s=now_s, silent=0)

    def ticked(self, now_s: float, missing: Missing) -> Step:
        """Re-request the announcement if messages are ``missing`` and none has arrived for long enough."""
        state = self
        if missing != self.missing:
            state = replace(self, missing=missing, looked_s=now_s, looks=0, silent=0)
        silence_s = now_s - max(state.heard_s, state.looked_s)
        pause_s = min(LOOK_CAP_S, LOOK_S * 2.0**state.looks)
        if not missing or (silence_s <= pause_s and now_s - state.looked_s <= LOOK_LATEST_S):
            return state, ()
        everything = missing if state.silent >= LOOKS else ()
        state, ask = state.asking()
        state = replace(state, looked_s=now_s, looks=state.looks + 1, silent=state.silent + 1)
        return state, (*everything, *ask)

    def announced(self, nonce: bytes, missing: Missing) -> tuple[Resync, tuple[Resubscribe, ...], bool]:
        """Take an announcement's nonce; return also whether it repeats the last one because we re-requested it.

        In that case re-request the messages that are still ``missing``.
        """
        repeats = self.asked and nonce == self.nonce
        state = replace(self, nonce=nonce, asked=False)
        return state, missing if repeats else (), repeats
