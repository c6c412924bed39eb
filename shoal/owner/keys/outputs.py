"""Folders that the owner's program writes for others: never among the owner's secrets, nor among somebody's files."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ConfigError


def check_output(owner: Path, folder: Path, *, ours: tuple[str, ...], last: str) -> None:
    """Return if ``folder`` may be written to for others to take: it is new, empty, or was written before.

    Args:
        owner: the owner's directory.
        folder: to write to.
        ours: names of what is written there.
        last: the one that is written last, by which a whole earlier output is known, whatever was put beside it since.

    Raises:
        ConfigError: it lies in the owner's directory, can't be read, or holds what was not written by us.
    """
    if folder.resolve().is_relative_to(owner.resolve()):
        raise ConfigError(
            f"--out {folder} lies in the owner's directory, whose secrets must not go along with what is written",
            hint="give a folder of its own, beside it",
        )
    try:
        there = sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"can't read {folder}: {error.strerror}", hint="give a folder of its own") from error
    others = [name for name in there if name not in ours]
    if others and last not in there:
        raise ConfigError(
            f"--out {folder} holds other things, such as {others[0]}", hint="give a folder of its own, new or empty"
        )
