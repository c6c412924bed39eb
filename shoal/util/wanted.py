"""Python types in words, for error messages."""

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
    """Return a description of values of ``kind``: "a whole number" for int."""
    return _WORDS.get(kind, kind.__name__)
