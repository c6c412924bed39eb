"""The command `shoal new`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.util.console import note, say


def new(
    kind: Annotated[str, typer.Argument(metavar="strategy|task|experiment", help="What to begin.")],
    name: Annotated[str, typer.Argument(help="Its name: lower-case letters, digits and hyphens.")],
) -> None:
    """Write a small runnable start for a strategy, a task or an experiment of your own, to a new folder of its name."""
    from shoal.new.writing import write_start

    paths = write_start(kind, name, Path(name))
    say("\n".join(map(str, paths)))
    script = next(path for path in paths if path.suffix == ".py" and not path.name.startswith("test_"))
    note(f"next: python {script}; pytest {name}")
    if kind != "experiment":
        note(f"then: pip install -e ./{name}, and use it by its name, {name}")
