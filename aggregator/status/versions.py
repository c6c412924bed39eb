"""The versions of the devices' software beside the aggregator's: which are older or newer, with advice.

A fleet is never upgraded at once. Devices of another version take part as long as they speak the wire version of the run, so a
mark is no fault: it names the machines that are left to upgrade.

Example: `compared("0.1.0", "0.2.0")` is OLDER.
"""

from __future__ import annotations

import re
from typing import Final

OLDER: Final = "older"
NEWER: Final = "newer"
SAME: Final = "same"
OTHER: Final = "other"
"""A version that can't be compared, such as one of a changed copy."""

_FORM: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9}){0,4})(?:\.?(dev|a|b|rc|post)([0-9]{1,9}))?", re.ASCII)
_STAGES: Final = {"dev": -4, "a": -3, "b": -2, "rc": -1, None: 0, "post": 1}


def compared(version: str, ours: str) -> str:
    """Return OLDER, NEWER, SAME or OTHER for the version of a device; empty if it is unknown.

    Args:
        version: of the device's software, such as ``0.1.0``, ``0.2.0.dev0`` or ``0.2.0rc1``; empty if unknown.
        ours: of the aggregator's.
    """
    if not version or not ours:
        return ""
    if version == ours:
        return SAME
    theirs, mine = _key(version), _key(ours)
    if theirs is None or mine is None or theirs == mine:
        return OTHER
    return OLDER if theirs < mine else NEWER


def advice(state: str, ours: str) -> str:
    """Return the advice for a device whose version is ``state`` beside the aggregator's version ``ours``."""
    return {
        OLDER: f"upgrade Shoal on it to {ours}, one device after the other; it takes part meanwhile",
        NEWER: f"upgrade the aggregator, which has {ours}; the device takes part meanwhile",
        OTHER: f"install {ours} on it, as on the aggregator; it takes part meanwhile",
    }.get(state, "")


def left_out(version: str, spoken: int, wire: int) -> tuple[str, str]:
    """Return why a device of software ``version`` is left out of a run in wire version ``wire``, and advice.

    Args:
        version: of its software; empty if unknown.
        spoken: the wire version that it speaks.
        wire: of the run.
    """
    reason = f"its software ({named(version, spoken)}) does not speak wire version {wire} of the run"
    if spoken < wire:
        return reason, "upgrade Shoal on it"
    return reason, "upgrade the owner's program and the aggregator, then start the next run"


def named(version: str, spoken: int) -> str:
    """Return the name of a device's software and the wire version that it speaks."""
    return f"shoal {version or 'of an unknown version'}, wire {spoken}"


def _key(version: str) -> tuple[tuple[int, ...], int, int] | None:
    found = _FORM.fullmatch(version)
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and not numbers[-1]:  # 0.2 and 0.2.0 are one version
        numbers.pop()
    return tuple(numbers), _STAGES[found[2]], int(found[3] or 0)
