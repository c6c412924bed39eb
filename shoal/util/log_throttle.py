"""Rate-limited warnings about refused messages, so that a peer that repeats itself can't fill the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from shoal.errors import LaterKindError, ShoalError, reason_of

FIRST_PAUSE_S: Final = 60.0
MOST_PAUSE_S: Final = 3600.0
"""The same refusal is logged again after pauses that double from FIRST_PAUSE_S to this."""
MOST_KNOWN: Final = 256
"""Number of different refusals that are remembered. While all of them are recent, further ones share one warning."""
MOST_CHARS: Final = 512
"""Longer topics and reasons are cut: a peer may choose a topic of up to 65,535 characters."""
TOO_MANY: Final = "too many different messages are refused to list each"


@dataclass(slots=True)
class _Known:
    again_s: float
    pause_s: float
    times: int = 0


class Refusals:
    """Logs refused messages: a new one at once, a repeated one after growing pauses with the number of repetitions."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: dict[tuple[str, str], _Known] = {}

    def tell(self, topic: str, error: ShoalError, now_s: float) -> None:
        """Log a warning, or only count the refusal if the same one was logged recently.

        A message of a kind that only a later version reads is skipped, which is no refusal.

        Args:
            topic: the message's topic.
            error: why it is refused.
            now_s: seconds of any monotonic clock.
        """
        if isinstance(error, LaterKindError):
            self._log.debug("skipped", extra={"kv": {"topic": topic, "reason": error}})
            return
        topic, reason, hint = topic[:MOST_CHARS], reason_of(error)[:MOST_CHARS], error.hint
        # A peer could otherwise fill memory and log with ever different topics.
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
        """Make room for another refusal and return whether there is any; the oldest one whose pause is over is dropped."""
        if len(self._known) < MOST_KNOWN:
            return True
        first = min(self._known, key=lambda key: self._known[key].again_s)
        if now_s < self._known[first].again_s:
            return False
        del self._known[first]
        return True
