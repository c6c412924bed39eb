"""Options of the form NAME=VALUE, and lines about a task, for several commands of `shoal-fleet`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.hints import wanted
from shoal.util.console import counted

if TYPE_CHECKING:
    from shoal.task.data_declaration import DataDeclaration
    from shoal.task.manifest import TaskManifest


def pairs(items: list[str]) -> dict[str, str]:
    """Return the names and values of ``items``, each NAME=VALUE.

    Raises:
        UsageError: one has another form.
    """
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"{item!r} is not NAME=VALUE", hint=f"write {name or 'NAME'}=VALUE")
        found[name] = value
    return found


def whole(text: str, name: str) -> int:
    """Return a whole number given as text.

    Raises:
        UsageError: the text is not of that form; the error names the option ``name``.
    """
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"{name} is {wanted(int)}, not {text!r}") from error


def private_words(manifest: TaskManifest) -> str:
    """Return a line about the parameters that stay on each device; the task has some."""
    names = ", ".join(p.name for p in manifest.private_parameters)
    return f"private: {names}: {manifest.private_length} of {manifest.length} coordinates never leave a device"


def data_words(data: DataDeclaration) -> str:
    """Return a line about the declaration of a task's data."""
    names = f"{counted(len(data.features), 'named feature')}, {counted(len(data.labels), 'named label')}"
    unit = data.target_scale[1]
    target = (
        f", targets from {data.target[0]:g} to {data.target[1]:g}: a loss of 1 is {unit:g} squared"
        if data.target
        else ""
    )
    return f"data: {names}, standardise {data.standardise}, missing values: {data.missing}{target}"
