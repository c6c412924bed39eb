"""Re-execution of a device's program without its command-line parser, to save memory in a process that runs for months.

`become` replaces this process by one with the imports that serving needs, about 20 MB less. The configuration is passed in
an unnamed file in memory, since an address may hold a password and other users can read command lines. `prepare` gives the same
settings to a process that has not loaded the parser, and so can serve as it is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

from edge_client.config import EdgeConfig
from shoal.errors import UsageError
from shoal.util.config import fields_of
from shoal.util.process import one_malloc_arena

MALLOC: Final = {"MALLOC_ARENA_MAX": "1"}
"""One malloc arena for all threads: they take turns anyway, and each further arena holds free pages of its own."""
_PR_SET_NAME: Final = 15
_PROCESS_NAME: Final = b"shoal-edge"


AS_JSON: Final = "--json"
"""Last argument of a serving program that prints the runs that have ended as JSON, and its error if it fails."""


def become(config: EdgeConfig, *, as_json: bool = False) -> NoReturn:
    """Replace this process by the serving program; with ``as_json`` it prints one JSON object at its end."""
    document = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items()}
    # Flags 0, without close-on-exec: the new program reads from this descriptor.
    handle = os.memfd_create("shoal-edge-config", 0)
    os.write(handle, json.dumps(document).encode())
    os.lseek(handle, 0, os.SEEK_SET)
    environment = {**os.environ, **MALLOC, **_threads(config)}
    arguments = [
        sys.executable,
        "-m",
        "edge_client.serving",
        str(config.dir),
        str(handle),
        *([AS_JSON] if as_json else []),
    ]
    os.execve(sys.executable, arguments, environment)  # noqa: S606 - our own interpreter


def inherited_config(arguments: list[str]) -> EdgeConfig:
    """Return the configuration that `become` has passed to this process.

    Raises:
        UsageError: this program was started by hand.
    """
    try:
        with os.fdopen(int(arguments[2]), "rb") as file:
            document = json.loads(file.read())
        fields = fields_of(EdgeConfig)
        values: dict[str, Any] = {
            k: Path(v) if fields[k].kind is Path and v is not None else v for k, v in document.items()
        }
        config = EdgeConfig(**values)
    except (IndexError, ValueError, OSError, KeyError, TypeError) as error:
        raise UsageError(
            "this program is not started by hand", hint="shoal-edge run DIRECTORY --data SOURCE"
        ) from error
    _set_name()
    return config


def prepare(config: EdgeConfig) -> None:
    """Give this process the environment, malloc setting and name of one that `become` has started.

    It has to come before numpy is loaded, whose BLAS reads its number of threads then, and before the first thread.
    """
    os.environ.update({**MALLOC, **_threads(config)})
    one_malloc_arena()
    _set_name()


def _threads(config: EdgeConfig) -> dict[str, str]:
    """Return the variables from which numeric libraries take their number of threads."""
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(config.threads))


def _set_name() -> None:
    """Set this process's name: tools like top and ps would otherwise show the interpreter's."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _PROCESS_NAME, 0, 0, 0)
