"""Types by the words that people know them by."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

_WORDS: Final[dict[type[Any], str]] = {
    bool: "on or off",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


def wanted(kind: type[Any]) -> str:
    """Return what a value of ``kind`` is: "a whole number" for int."""
    return _WORDS.get(kind, kind.__name__)
