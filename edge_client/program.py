"""`shoal-edge`, the program: serves at once when `run` has plain options, and leaves every other command line to typer.

A service's command line is nearly always plain. typer and pydantic would take .2 s of a start to read it, and 20 MB for as long
as the process runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from edge_client.config import EdgeConfig
from shoal.util.config import settings_in

RUN: Final = "run"
AS_JSON: Final = "--json"
DEBUG: Final = "--debug"
"""Read by `shoal.util.console.run_program`, wherever it stands."""
CONFIG: Final = "config"
"""The option that names a TOML file; no setting of its own."""


def plain_run(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the settings that the arguments of `shoal-edge run` name, as typer reads them; None if they aren't plain.

    Plain are DIRECTORY, ``--name VALUE``, and switches. All else is for typer: ``--name=VALUE``, the help, mistakes.

    Args:
        arguments: of the program, without its name.
    """
    if not arguments or arguments[0] != RUN:
        return None
    settings = [s for s in settings_in(EdgeConfig).values() if not s.rare and not s.argument]
    switches = {option: (s.name, option == s.option) for s in settings if s.off for option in (s.option, f"--{s.off}")}
    kinds: dict[str, tuple[str, type[Any]]] = {s.option: (s.name, s.kind) for s in settings if not s.off}
    kinds[f"--{CONFIG}"] = CONFIG, Path
    found = dict[str, Any]()
    words = iter(arguments[1:])
    for word in words:
        if word in (AS_JSON, DEBUG):
            continue
        if word in switches:
            switch, on = switches[word]
            found[switch] = on
        elif not word.startswith("-"):
            if not word or "dir" in found:
                return None
            found["dir"] = Path(word)
        else:
            text = next(words, "")
            if word not in kinds or not text or text.startswith("-"):
                return None
            name, kind = kinds[word]
            try:
                found[name] = kind(text)
            except ValueError:
                return None
    return found


def __getattr__(name: str) -> Any:
    """Return ``app``, the typer application of all commands, which is loaded when it is asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edge_client.cli import app

    return app


def main() -> None:
    """Run the program."""
    flags = plain_run(sys.argv[1:])
    if flags is None:
        from edge_client.cli import main as command_line

        command_line()
        return
    from edge_client.serving import serve_and_report
    from shoal.util.config import read
    from shoal.util.console import run_program

    def program(**_: object) -> None:
        config = read(EdgeConfig, file=flags.pop(CONFIG, None), flags=flags).config()
        serve_and_report(config, as_json=AS_JSON in sys.argv)

    run_program(program, prog="shoal-edge", secret=True)


if __name__ == "__main__":
    main()
