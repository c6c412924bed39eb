"""Strategies, splits, tasks and commands of other installed packages, by their entry points.

A package names what it adds in its pyproject.toml, and the name is then used like a built-in one:

    [project.entry-points."shoal.strategies"]
    geometric-median = "geometric_median:GeometricMedian"

Rules
- Only installed packages count, on the machine where the name is used: nothing that a fleet sends names code.
- A built-in name goes first, so that no package can replace what a fleet relies on.
- A package is imported when its name is used, not before.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from shoal.errors import ConfigError

STRATEGIES_GROUP: Final = "shoal.strategies"
SPLITS_GROUP: Final = "shoal.splits"
TASKS_GROUP: Final = "shoal.tasks"
COMMANDS_GROUP: Final = "shoal.commands"


def extension_names(group: str) -> list[str]:
    """Return the names that installed packages add to a group, in order."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load_extension(group: str, name: str) -> Any:
    """Return what an installed package calls ``name`` in a group; None if no package does.

    Raises:
        ConfigError: several packages use the name, or the package can't be imported.
    """
    named = (entry for entry in entry_points(group=group) if entry.name == name)
    found = list({(entry.value, _package(entry)): entry for entry in named}.values())
    if not found:
        return None
    if len(found) > 1:
        packages = sorted(_package(entry) for entry in found)
        raise ConfigError(f"{name} is in {len(packages)} packages: {', '.join(packages)}", hint="uninstall all but one")
    (entry,) = found
    try:
        return entry.load()
    except Exception as error:  # the package's own code may raise anything
        raise ConfigError(
            f"{name} of the package {_package(entry)} can't be loaded: {type(error).__name__}: {str(error)[:300]}",
            hint=f"it names {entry.value}; does that import?",
        ) from error


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value.partition(":")[0]
