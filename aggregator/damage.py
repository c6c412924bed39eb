"""A run's files that hold something else than was written there: one error that says where, whatever reading them raised."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from wire.errors import IntegrityError

_DAMAGE: Final = (sqlite3.DatabaseError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


class _Held(Protocol):
    """Something that lives in a directory."""

    directory: Path


P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=_Held)


@contextmanager
def readable(directory: Path) -> Iterator[None]:
    """Do what reads a run's files.

    Raises:
        IntegrityError: the files hold something else than was written there.
    """
    try:
        yield
    except _DAMAGE as error:
        raise _unreadable(directory, error) from error


def reads(method: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
    """Have a method read the files in its object's ``directory`` as `readable` does."""

    @wraps(method)
    def read(held: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(held, *args, **kwargs)
        except _DAMAGE as error:
            raise _unreadable(held.directory, error) from error

    return read


def _unreadable(directory: Path, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"{directory} can't be read: {type(error).__name__}: {str(error)[:200]}",
        hint="if it is damaged, restore it from a backup, or move it away and sign a new run",
    )
