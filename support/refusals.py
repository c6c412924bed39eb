"""Warnings about what others send, so that whoever repeats himself does not fill the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 60.0
MOST_PAUSE_S: Final = 3600.0
"""The same refusal is told again after pauses that double from the first to this."""
MOST_KNOWN: Final = 256
"""Refusals that are remembered; of more the oldest go."""


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
        key = topic, reason
        known = self._known.get(key)
        if known is not None and now_s < known.again_s:
            known.times += 1
            return
        facts: dict[str, object] = {"topic": topic, "reason": reason}
        if hint:
            facts["hint"] = hint
        if known is None:
            while len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = _Known(now_s + FIRST_PAUSE_S, FIRST_PAUSE_S)
        else:
            facts["times"] = known.times + 1
            known.pause_s = min(2 * known.pause_s, MOST_PAUSE_S)
            known.again_s, known.times = now_s + known.pause_s, 0
        self._log.warning("refused", extra={"kv": facts})
