"""Arguments, options of the form NAME=VALUE, lines about a task, and reminders, for several commands of `shoal-fleet`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.errors import ShoalError, UsageError
from shoal.hints import wanted
from shoal.util.console import counted, note

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory
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


def add_hint(error: ShoalError, hint: str) -> None:
    """Add ``hint`` to an error's own, if it has one."""
    error.hint = f"{error.hint}; {hint}" if error.hint else hint


Directory = Annotated[Path, typer.Argument(help="The owner's directory.")]


def broker_users(fleet: FleetDirectory, effect: str, *, published: bool) -> None:
    """If the broker has users, print how to update them.

    Args:
        fleet: the owner's directory.
        effect: completes the sentence "the broker ...".
        published: whether this command publishes, which updates the users of a broker that takes them while it runs.
    """
    if fleet.users.dynamic:
        if not published:
            note(f"next: shoal-fleet publish {fleet.path}: only then the broker {effect}")
    elif fleet.users:
        note(
            f"next: shoal-fleet broker-config {fleet.path} FOLDER again, then "
            "copy the files to the broker's host and send mosquitto a SIGHUP: only then "
            f"the broker {effect}"
        )
