"""Check of output folders: neither inside the owner's directory nor among unrelated files."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ConfigError


def check_output(owner: Path, folder: Path, *, ours: tuple[str, ...], last: str) -> None:
    """Check that ``folder`` may receive output for other machines: it is new, empty, or holds an earlier output.

    Args:
        owner: the owner's directory.
        folder: the output folder.
        ours: names of the files that are written there.
        last: the file that is written last. If it exists, an earlier output is complete, and other files next to it are
            accepted.

    Raises:
        ConfigError: the folder is inside the owner's directory, can't be read, or holds unrelated files.
    """
    if folder.resolve().is_relative_to(owner.resolve()):
        raise ConfigError(
            f"{folder} lies in the owner's directory, whose secrets must not be copied with the output",
            hint="give a separate folder next to it",
        )
    try:
        there = sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"can't read {folder}: {error.strerror}", hint="give a separate folder") from error
    others = [name for name in there if name not in ours]
    if others and last not in there:
        raise ConfigError(
            f"{folder} holds other things, such as {others[0]}", hint="give a separate folder, new or empty"
        )
