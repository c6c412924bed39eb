"""The versions of this software and of its messages, as constants: a device would read its metadata with 3 MB of memory."""

from __future__ import annotations

import sys
from typing import Final

VERSION: Final = "0.2.0.dev0"
"""The one place of the version: hatchling reads this line, and devices announce the version."""
WIRE: Final = 3
"""The wire version: it fixes the messages of a run, whose plan and whose parties' presences tell it. Others are refused."""


def versions() -> str:
    """Return the versions of this software and of Python, for people."""
    return f"shoal {VERSION}, Python {'.'.join(map(str, sys.version_info[:3]))}"
