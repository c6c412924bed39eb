"""The command `shoal new`."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from shoal.errors import ConfigError, UsageError
from shoal.util.console import note, say
from shoal.util.files import write_failed


def new(
    kind: Annotated[str, typer.Argument(metavar="strategy|task|experiment", help="What to begin.")],
    name: Annotated[str, typer.Argument(help="Its name: lower-case letters, digits and hyphens.")],
) -> None:
    """Write a small runnable start for a strategy, a task or an experiment of your own, to a new folder of its name."""
    paths = write_start(kind, name, Path(name))
    say("\n".join(map(str, paths)))
    script = next(path for path in paths if path.suffix == ".py" and not path.name.startswith("test_"))
    note(f"next: python {script}; pytest {name}")
    if kind != "experiment":
        note(f"then: pip install -e ./{name}, and use it by its name, {name}")


KINDS: Final = ("strategy", "task", "experiment")
TEMPLATE_SUFFIX: Final = ".txt"
"""Of every template, so that no tool takes it for a source file."""
MOST_NAME: Final = 40
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)


def write_start(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the files of a start into ``folder``, which is made, and return their paths.

    Args:
        kind: one of KINDS.
        name: in lower case, with hyphens between words.
        folder: a new or empty one.

    Raises:
        UsageError: no such kind, a name of another form, or a folder with files in it.
        ConfigError: a file can't be written.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no start for {kind!r}", hint=f"there are {', '.join(KINDS)}")
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or len(name) > MOST_NAME or iskeyword(module):
        raise UsageError(
            f"the name {name!r} is not 1 to {MOST_NAME} lower-case letters, digits and hyphens",
            hint="for example my-idea",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty", hint="choose another name, or call this in another folder")
    words = {"name": name, "module": module, "Class": "".join(word.capitalize() for word in name.split("-"))}
    texts = {Template(t.name.removesuffix(TEMPLATE_SUFFIX)).substitute(words): t for t in _templates(kind)}
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for filename, template in sorted(texts.items()):
            path = folder / filename
            path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
            paths.append(path)
    except OSError as error:
        raise write_failed(folder, error) from error
    return paths


def _templates(kind: str) -> list[Traversable]:
    found = [t for t in files("shoal.new").joinpath("templates", kind).iterdir() if t.name.endswith(TEMPLATE_SUFFIX)]
    if not found:
        raise ConfigError(f"this installation has no templates for a {kind}", hint="install shoal again")
    return found
