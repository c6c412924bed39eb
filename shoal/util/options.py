"""Arguments and options that several programs have, and those of a configuration: see `options_of`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from shoal.util.config import Setting, read, settings_in, table_of

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Healthy = Annotated[
    bool,
    typer.Option(
        "--check",
        help="For health checks: exit status 11 unless the program runs, is connected and has shown a sign of life.",
    ),
]
GrantFile = Annotated[Path, typer.Argument(help="The owner's grant.", exists=True, dir_okay=False)]
OwnerPrint = Annotated[str, typer.Option(help="The owner's fingerprint, as `shoal-fleet show` prints it.")]
CONFIG: Final = "config"
"""The option that names a TOML file."""


def new_app(help_: str, **more: Any) -> typer.Typer:
    """Return the typer application of a program."""
    return typer.Typer(
        help=help_,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        **more,
    )


def options_of(kind: type[Any], *names: str, file: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a configuration; its first parameter is the `Layers` of all settings.

    Args:
        kind: the configuration.
        names: the settings that the command has as options or argument: if none is named, all but rare ones. The others come
            from the lower layers.
        file: whether the command has --config.
    """
    settings = settings_in(kind)
    names = names or tuple(name for name, setting in settings.items() if not setting.rare)
    hints: dict[str, Any] = {name: _hint(settings[name]) for name in names}
    if file:
        table = f"TOML file with an [{table_of(kind)}] table."
        hints[CONFIG] = Annotated[Path | None, typer.Option(help=table)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own_hints = get_type_hints(command, include_extras=True)
        _, *own = inspect.signature(command).parameters.values()

        @wraps(command)
        def with_settings(*arguments: Any, **given: Any) -> None:
            flags = {name: given.pop(name, None) for name in names}
            command(read(kind, file=given.pop(CONFIG, None), flags=flags), *arguments, **given)

        keyword = inspect.Parameter.KEYWORD_ONLY
        made = [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in hints.items()]
        given = [p.replace(kind=keyword, annotation=own_hints[p.name]) for p in own]
        arguments = [p for p in given if p.default is p.empty]
        rest = [p for p in given if p.default is not p.empty]
        parameters = [*arguments, *made, *rest]
        with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_settings.__annotations__ = {p.name: p.annotation for p in parameters}
        del with_settings.__wrapped__  # typer would read the types of the command itself
        return with_settings

    return decorate


def _hint(setting: Setting) -> Any:
    """Return a setting as typer reads it; None is its default, since a lower layer may have a value."""
    if setting.argument:
        return Annotated[Path | None, typer.Argument(metavar=setting.metavar, help=setting.help)]
    forms = setting.option + (f"/--{setting.off}" if setting.off else "")
    shown = setting.shown or _default(setting) or False
    return Annotated[
        setting.kind | None, typer.Option(forms, metavar=setting.metavar, help=setting.help, show_default=shown)
    ]


def _default(setting: Setting) -> str:
    """Return a default as the help shows it; empty if there is nothing to show."""
    if isinstance(setting.default, bool):
        return "" if setting.default else setting.off
    return "" if setting.default in ("", None, MISSING) else f"{setting.default}"
