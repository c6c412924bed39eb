"""The command `shoal new`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.util.console import note, say_result
from shoal.util.options import AsJson


def new(
    kind: Annotated[str, typer.Argument(metavar="strategy|task|experiment", help="What to begin.")],
    name: Annotated[str, typer.Argument(help="Its name: lower-case letters, digits and hyphens.")],
    out: Annotated[Path | None, typer.Option(help="New folder.", show_default="the name")] = None,
    json: AsJson = False,
) -> None:
    """Write a small runnable start for a strategy, a task or an experiment of your own."""
    from shoal.new.writing import write_start

    folder = Path(name) if out is None else out
    paths = write_start(kind, name, folder)
    files = [str(path) for path in paths]
    say_result({"kind": kind, "name": name, "files": files}, *files, as_json=json)
    script = next(path for path in paths if path.suffix == ".py" and not path.name.startswith("test_"))
    note(f"next: python {script}; pytest {folder}")
    if kind != "experiment":
        note(f"then: pip install -e {folder}, and use it by its name, {name}")
