"""The version of this software, as a constant: reading it from the installed package costs a device 3 MB of memory."""

from __future__ import annotations

import sys
from typing import Final

VERSION: Final = "0.2.0.dev0"
"""The one place of the version: hatchling reads this line, and devices announce the version."""


def versions() -> str:
    """Return the versions of this software and of Python, for people."""
    return f"shoal {VERSION}, Python {'.'.join(map(str, sys.version_info[:3]))}"
