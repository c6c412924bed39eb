"""Format unix times for people, in UTC."""

from __future__ import annotations

import time


def day(at_s: int) -> str:
    """Return the date of a unix time in seconds, UTC: 2026-11-22."""
    return time.strftime("%Y-%m-%d", time.gmtime(at_s))


def span(seconds: int) -> str:
    """Return a time span in its two largest units: 45 s, 7 min, 2 h 5 min, 3 d 4 h."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        parts = [f"{days} d", f"{hours % 24} h" if hours % 24 else ""]
    elif hours:
        parts = [f"{hours} h", f"{minutes % 60} min" if minutes % 60 else ""]
    else:
        parts = [f"{minutes} min" if minutes else f"{seconds} s"]
    return " ".join(part for part in parts if part)


def second(at_s: int) -> str:
    """Return unix seconds in ISO 8601, UTC: 2026-11-22T16:27:10Z; a time out of `time.gmtime`'s range as the number."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
    except (OverflowError, OSError, ValueError):
        return f"second {at_s}"
