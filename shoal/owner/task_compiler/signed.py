"""A compiled task in the owner's files: manifest and graphs, their source, and a signature over their digest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crypto.seal.identity import Identity, verify
from shoal.errors import TaskError, UntrustedError
from shoal.owner.task_compiler.external import ORIGINS_FILE
from shoal.task.bundle import PRIVATE_FILE, TaskBundle
from shoal.task.manifest import GRAPH_NAMES
from shoal.util.files import write_atomic

SIGNATURE_FILE: Final = "task.sig"
SOURCE_FILE: Final = "source.json"
PURPOSE: Final = "task-bundle"
GRAPH_FILES: Final = tuple(f"{name}.onnx" for name in GRAPH_NAMES)
TASK_FILES: Final = ("task.toml", *GRAPH_FILES, PRIVATE_FILE, ORIGINS_FILE, SOURCE_FILE, SIGNATURE_FILE)
"""Names of the files that `write_signed` writes; the signature is last."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a task: a built-in's name or ``file.py:function``, and the built-in's options."""

    spec: str
    options: dict[str, int]


def write_signed(bundle: TaskBundle, source: Source, owner: Identity, directory: Path, origins: bytes = b"") -> None:
    """Write the files of the bundle, source.json and task.sig, and the starting models of a task for own training code."""
    bundle.to_dir(directory)
    if origins:
        write_atomic(directory / ORIGINS_FILE, origins)
    write_atomic(directory / SOURCE_FILE, json.dumps({"source": source.spec, "options": source.options}).encode())
    write_atomic(directory / SIGNATURE_FILE, owner.sign(PURPOSE, bundle.digest).hex().encode())


def read_signed(directory: Path, owner: Identity) -> tuple[TaskBundle, Source]:
    """Return the bundle and its source.

    Raises:
        TaskError: the directory holds no task, or a file is damaged.
        UntrustedError: the signature over the bundle is not this owner's.
    """
    bundle = TaskBundle.from_dir(directory)
    try:
        signature = bytes.fromhex((directory / SIGNATURE_FILE).read_text(encoding="ascii").strip())
        document = json.loads((directory / SOURCE_FILE).read_text(encoding="utf-8"))
        source = Source(str(document["source"]), {str(k): int(v) for k, v in document["options"].items()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise TaskError(
            f"{directory} lacks a signature or a source: {error}", hint="make it with shoal-fleet task compile"
        ) from error
    try:
        verify(owner.member.sign_key, PURPOSE, bundle.digest, signature)
    except UntrustedError as error:
        raise UntrustedError(
            f"the task in {directory} is not the one that this owner signed", hint="compile it again"
        ) from error
    return bundle, source
