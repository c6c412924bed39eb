"""The version of this software, as a constant: reading it from the installed package costs a device 3 MB of memory."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
"""As in pyproject.toml, which a test compares."""
