"""Help in two lengths: `--help` shows the options that most people need, `--help-all` shows every option.

A command declares its other options with ``hidden=True`` and takes a parameter of type `HelpAll`:

    @app.command()
    def join(broker: Broker, wait_s: Annotated[float, typer.Option(hidden=True)] = 10.0, _all: HelpAll = False) -> None: ...
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shoal.util.console import say


def reveal(command: Any) -> None:
    """Let the help of a typer command show all of its options."""
    for parameter in command.params:
        parameter.hidden = False


def reveals(command: Any) -> bool:
    """Return whether the help of a typer command shows all of its options."""
    return not any(getattr(parameter, "hidden", False) for parameter in command.params)


def _show(context: typer.Context, wanted: bool) -> None:
    if wanted:
        reveal(context.command)
        say(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="Show all options.", is_eager=True, expose_value=False, callback=_show),
]
