"""Save results as JSON, with the command, the commit and the machine that produced them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shoal.errors import UsageError
from shoal.util.files import write_atomic

LIBRARIES: Final = ("numpy", "cryptography", "paho-mqtt", "onnxruntime", "torch", "scipy", "scikit-learn")
"""Distributions whose versions are part of a result."""


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


def save(path: Path, data: dict[str, Any], *, command: Sequence[str] = ()) -> None:
    """Write ``data`` to ``path`` as JSON, with ``command`` (by default this program's command line), commit and machine."""
    document = {
        "command": list(command) or command_of(sys.argv[1:]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": _machine(),
        "data": data,
    }
    write_atomic(path, (json.dumps(document, indent=2) + "\n").encode(), mode=0o644)


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
