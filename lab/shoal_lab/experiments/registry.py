"""The studies by name: tables in the folder's TOML files, read when a name is asked for; ``[defaults]`` is for all of a file.

Example: the id of the first study.

    >>> ids()[0]
    'ifca-synthetic'
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shoal.errors import UsageError
from shoal_lab.experiments.common.experiment import Study, imported, one_of

FOLDER: Final = Path(__file__).parent / "studies"
FILES: Final = ("ifca", "cfl", "fedgroup", "newcomers", "wild")
"""Files of this package, in the order of the list."""
TABLE: Final = ".toml"
"""Ending of a file with studies of one's own, which may stand for a name."""
KINDS: Final = {
    **dict.fromkeys(("paper", "title", "task", "measure", "runner"), str),
    **dict.fromkeys(("devices", "samples", "rounds"), int),
    **dict.fromkeys(("algorithms", "needs"), list),
    **dict.fromkeys(("values", "methods", "published", "refuses"), dict),
}
"""Types of a table's keys."""
MERGED: Final = ("values", "methods")

_added: dict[str, Study] = {}


def ids() -> tuple[str, ...]:
    """Return every study's id, in the papers' order."""
    return (*_ours(), *_added)


def find(name: str) -> Study:
    """Return the study called ``name``, or the only one of the file of this name.

    Raises:
        UsageError: there is no such study, or the file is no table of a study.
    """
    if name.endswith(TABLE):
        found = read(Path(name))
        if len(found) != 1:
            raise UsageError(f"{name} has {len(found)} studies", hint="a file on the command line has one")
        return next(iter(found.values()))
    every = {**_ours(), **_added}
    return every[one_of("experiment", name, every)]


def register(study: Study) -> None:
    """Add a study from outside this package to those that `ids` and `find` know.

    Raises:
        UsageError: its id is taken.
    """
    if study.id in ids():
        raise UsageError(f"there is an experiment {study.id!r} already")
    _added[study.id] = study


@functools.cache
def _ours() -> dict[str, Study]:
    return {name: study for file in FILES for name, study in read(FOLDER / f"{file}{TABLE}").items()}


def read(path: Path) -> dict[str, Study]:
    """Return the studies of a file by id, with its ``[defaults]`` filled in.

    Raises:
        UsageError: it can't be read, or has a key that studies do not have.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        defaults = tables.pop("defaults", {})
        return {name: _study(name, table, defaults) for name, table in tables.items()}
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}", hint="shoal simulate --list names ours") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no table of a study: {error}", hint="see docs/researcher/studies.md") from error


def _study(name: str, table: Mapping[str, Any], defaults: Mapping[str, Any]) -> Study:
    """Return a study whose missing keys, values and methods are those of ``defaults``."""
    fields = {**defaults, **table}
    for key in MERGED:
        fields[key] = {**defaults.get(key, {}), **table.get(key, {})}
    for key, kind in KINDS.items():
        if key in fields and not isinstance(fields[key], kind):
            raise ValueError(f"{key} of {name} is no {kind.__name__}")
    if not fields.get("algorithms"):
        raise ValueError(f"{name} lacks 'algorithms'")
    fields.setdefault("published", dict.fromkeys(fields["algorithms"]))
    if "scenarios" in fields:
        fields["scenarios"] = imported(fields["scenarios"])()
        fields["title"] = f"{len(fields['scenarios'])} {fields['title']}"
    return Study(id=name, **fields)
