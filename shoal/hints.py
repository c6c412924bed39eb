"""Resolved type hints of dataclass fields, for the codecs of messages and of states, and types in words."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, Final

_WORDS: Final[dict[type[Any], str]] = {
    bool: "on or off",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


def field_hints(cls: type[Any]) -> dict[str, Any]:
    """Return the fields of a dataclass in order: name -> resolved hint, including the metadata of `Annotated`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def optional_of(hint: Any) -> Any | None:
    """Return X if ``hint`` is ``X | None``, else None."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return None
    # Unpacking one value raises ValueError for unions of more types, which the formats don't have.
    (inner,) = (a for a in typing.get_args(hint) if a is not types.NoneType)
    return inner


def is_enum(hint: Any) -> bool:
    """Return whether ``hint`` is an enumeration."""
    return isinstance(hint, type) and issubclass(hint, Enum)


def wanted(kind: type[Any]) -> str:
    """Return a description of values of ``kind``: "a whole number" for int."""
    return _WORDS.get(kind, kind.__name__)
