"""Format unix times for people, in UTC."""

from __future__ import annotations

import time


def day(at_s: int) -> str:
    """Return the date of a unix time in seconds, UTC: 2026-11-22."""
    return time.strftime("%Y-%m-%d", time.gmtime(at_s))


def second(at_s: int) -> str:
    """Return unix seconds as ISO 8601 in UTC: 2026-11-22T16:03:07Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def utc(at_s: int) -> str:
    """Return unix seconds as date and minute in UTC; a time out of `time.gmtime`'s range as the number."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))
    except (OverflowError, OSError, ValueError):
        return f"second {at_s}"


def iso(at_s: int) -> str:
    """Return unix seconds in ISO 8601, UTC: 2026-11-22T16:27:10Z; a time out of `time.gmtime`'s range as the number."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
    except (OverflowError, OSError, ValueError):
        return f"second {at_s}"
