"""Warnings about what others send, so that whoever repeats himself does not fill the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 60.0
MOST_PAUSE_S: Final = 3600.0
"""The same refusal is told again after pauses that double from the first to this."""
MOST_KNOWN: Final = 256
"""Different refusals that are remembered. While all of them are recent, further ones are only counted, in one warning."""
MOST_CHARS: Final = 512
"""A longer topic or reason is cut: MQTT allows topics of 65,535 characters, and a peer chooses them."""
TOO_MANY: Final = "too many different messages are refused to list each"


@dataclass(slots=True)
class _Known:
    again_s: float
    pause_s: float
    times: int = 0


class Refusals:
    """Tells of refused messages: at once what is new, the same only now and then, with how often it came."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: dict[tuple[str, str], _Known] = {}

    def tell(self, topic: str, reason: str, hint: str, now_s: float) -> None:
        """Warn, or count where the same was told a moment ago.

        Args:
            topic: where the message came.
            reason: why it is refused.
            hint: what to do about it, or nothing.
            now_s: any clock that does not go back.
        """
        topic, reason = topic[:MOST_CHARS], reason[:MOST_CHARS]
        if (topic, reason) not in self._known and not self._make_room(now_s):
            topic, reason, hint = "*", TOO_MANY, "check the broker's access list: shoal-fleet broker-config"
        key = topic, reason
        known = self._known.get(key)
        if known is not None and now_s < known.again_s:
            known.times += 1
            return
        facts: dict[str, object] = {"topic": topic, "reason": reason}
        if hint:
            facts["hint"] = hint
        if known is None:
            self._known[key] = _Known(now_s + FIRST_PAUSE_S, FIRST_PAUSE_S)
        else:
            facts["times"] = known.times + 1
            known.pause_s = min(2 * known.pause_s, MOST_PAUSE_S)
            known.again_s, known.times = now_s + known.pause_s, 0
        self._log.warning("refused", extra={"kv": facts})

    def _make_room(self, now_s: float) -> bool:
        """Return whether another refusal can be remembered; the one that may be logged again first is forgotten for it."""
        if len(self._known) < MOST_KNOWN:
            return True
        first = min(self._known, key=lambda key: self._known[key].again_s)
        if now_s < self._known[first].again_s:
            return False
        del self._known[first]
        return True
