"""Save results as JSON, with the command, the commit and the machine that produced them.

A file whose name ends with ``.jsonl`` holds many runs, a line each, as in results/. Saving a run again replaces its line.

Example: ``shoal simulate cfl-toys --seed 3 --save results/cfl.jsonl`` adds a line to results/cfl.jsonl.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from shoal.errors import IntegrityError, UsageError
from shoal.util.files import write_atomic

LIBRARIES: Final = ("numpy", "cryptography", "paho-mqtt", "onnxruntime", "torch", "scipy", "scikit-learn")
"""Distributions whose versions are part of a result."""
LINES: Final = ".jsonl"
"""Ending of a file with a compact line a run."""
HISTORY: Final = "history"
MOST_POINTS: Final = 20
"""Points of a history, and of a line of a panel, in such a line."""
DIGITS: Final = 4
"""Significant digits of these figures in such a line."""


def check_place(path: Path, option: str) -> None:
    """Check, before the work whose result goes there, that a file can be written at ``path``.

    Args:
        path: the file.
        option: the command-line option that named it, for the error message.

    Raises:
        UsageError: the folder is missing or can't be written, or ``path`` is a folder.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} for {option}", hint="make it, or name another file")
    try:
        # Permission bits don't tell whether a write works (read-only mounts, quotas), so try one.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"can't write {option} {path}: {error.strerror}", hint="name a file in another folder"
        ) from error
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder", hint="name a file")


def save(path: Path, data: dict[str, Any], *, command: Sequence[str] = (), name: str = "") -> None:
    """Write ``data`` to ``path`` as JSON, with ``command`` (by default this program's command line), commit and machine.

    Args:
        path: a file of one run, or, with the ending ``.jsonl``, of many: a line each, with thinned histories.
        data: the figures.
        command: makes them again.
        name: tells runs of one command apart.

    Raises:
        ConfigError: the file can't be written.
        IntegrityError: a line of the file is not a saved run.
    """
    document = {
        "command": list(command) or command_of(sys.argv[1:]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": _machine(),
        "data": data,
    } | ({"name": name} if name else {})
    if path.suffix != LINES:
        write_atomic(path, (json.dumps(document, indent=2) + "\n").encode(), mode=0o644)
        return
    with _locked(path.absolute().parent):
        keys = [key_of(one) for one in read_lines(path)] if path.exists() else []
        kept = dict(zip(keys, path.read_text().splitlines() if keys else (), strict=True))
        kept[key_of(document)] = json.dumps(compact(document), separators=(",", ":"))
        write_atomic(path, "".join(f"{line}\n" for line in kept.values()).encode(), mode=0o644)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other programs that save lines in a folder waiting."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def load(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the saved runs of a folder with their files, by file name and line."""
    for file in sorted(folder.glob(f"*{LINES}")):
        for document in read_lines(file):
            yield file, document


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the runs of a file with a line each.

    Raises:
        IntegrityError: a line is not a saved run.
    """
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            document = _changed(json.loads(line), {HISTORY: _rows})
            key_of(document)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise IntegrityError(f"line {number} of {file} is not a saved run", hint="remove the line") from error
        found.append(document)
    return found


def key_of(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what tells a run from the others of its file: its name, or its command without ``--save``."""
    if document.get("name"):
        return (document["name"],)
    words, rest = [], iter(document["command"])
    for word in rest:
        if word == "--save":
            next(rest, None)
        elif not word.startswith("--save="):
            words.append(word)
    return tuple(words)


def compact(value: Any) -> Any:
    """Return JSON data with each history as columns, rounded, of MOST_POINTS points at most, first and last among them.

    The lines of panels are thinned likewise; dots all stay. The figures of splits are rounded.
    """
    return _changed(value, {HISTORY: _columns, "panels": _panels, "splits": _rounded})


def _changed(value: Any, by_key: Mapping[str, Callable[[Any], Any]]) -> Any:
    if isinstance(value, Mapping):
        return {key: by_key[key](one) if key in by_key else _changed(one, by_key) for key, one in value.items()}
    return [_changed(one, by_key) for one in value] if isinstance(value, list) else value


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [_rounded(row.get(name)) for row in _chosen(rows)] for name in {n: 0 for r in rows for n in r}}


def _panels(panels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **panel,
            "lines": [
                {**line} | {xy: _rounded(line[xy] if line.get("dots") else _chosen(line[xy])) for xy in "xy"}
                for line in panel["lines"]
            ],
        }
        for panel in panels
    ]


def _chosen(points: Sequence[Any]) -> list[Any]:
    step = max(1.0, (len(points) - 1) / (MOST_POINTS - 1))
    return [points[round(i * step)] for i in range(min(len(points), MOST_POINTS))]


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def lacking(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a saved result lacks to be made again: ``cpu``, ``libraries``, ``commit``.

    Args:
        document: the JSON object that `save` has written. A commit with files changed since counts as lacking.
    """
    machine, commit = document.get("machine", {}), document.get("commit", "")
    found = {
        "cpu": bool(machine.get("cpu")),
        "libraries": bool(machine.get("libraries")),
        "commit": re.fullmatch("[0-9a-f]{40}", commit) is not None,
    }
    return tuple(name for name, there in found.items() if not there)


def command_of(arguments: list[str]) -> list[str]:
    """Return the command line for another machine: paths below the working directory relative, others by their last name."""
    here = Path.cwd()
    words = ["shoal"]
    for word in arguments:
        option, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
        path = Path(value)
        if path.is_absolute():
            value = str(path.relative_to(here)) if path.is_relative_to(here) else path.name
        words.append(option + sign + value)
    return words


def _commit() -> str:
    """Return the commit of the source tree, with "+" if files were changed since; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _version(name: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    # platform.processor() is empty or only the architecture on most distributions.
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_before_s60": os.getloadavg()[0],
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := _version(name))},
        "system": platform.system(),
    }
