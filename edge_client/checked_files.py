"""Private files of a device that end with the SHA-256 of everything before, so that a torn or altered one is found.

Example: after ``write_checked(path, encode(scale))``, ``read_checked(path, Scale, "remove it")`` is ``(scale, b"")``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.digests import before_digest, sha256
from shoal.errors import IntegrityError, WireError
from shoal.protocol.codec import decode_prefix
from shoal.util.files import PRIVATE_DIR_MODE, read_if_there, sync_directory, write_atomic, write_failed

T = TypeVar("T")
LOG = logging.getLogger("shoal.edge")


def write_checked(path: Path, *pieces: bytes, sync_name: bool = True) -> None:
    """Write ``pieces`` and their SHA-256; durable on return, but for the name without ``sync_name``.

    Raises:
        ConfigError: the file can't be written; StorageError if the disk is full.
    """
    write_atomic(path, *pieces, sha256(*pieces), sync_name=sync_name)


def verified(path: Path, data: bytes, hint: str) -> memoryview:
    """Return the bytes before the SHA-256 that ends ``data``.

    Args:
        path: the file, for the error.
        data: its bytes.
        hint: advice for the error.

    Raises:
        IntegrityError: the file is cut short, torn or altered.
    """
    content = before_digest(data)
    if content is None:
        raise IntegrityError(f"{path} is damaged", hint=hint)
    return content


def read_checked(path: Path, kind: Callable[..., T], hint: str) -> tuple[T, memoryview] | None:
    """Return the message that a file begins with, and the bytes between it and the SHA-256; None if the file is missing.

    Raises:
        IntegrityError: the file is cut short, torn or altered, or does not begin with such a message.
        ConfigError: other users can read the file.
    """
    data = read_if_there(path)
    return None if data is None else decoded(path, verified(path, data, hint), kind, hint)


def decoded(path: Path, content: memoryview, kind: Callable[..., T], hint: str) -> tuple[T, memoryview]:
    """Return the message that a file's content begins with, and the bytes after it.

    Raises:
        IntegrityError: it does not begin with such a message.
    """
    try:
        return decode_prefix(content, kind)  # type: ignore[arg-type]
    except WireError as error:
        raise IntegrityError(f"{path} is damaged, or not what belongs there: {error}", hint=hint) from error


def make_folder(folder: Path) -> None:
    """Make a private folder in an existing directory, unless it is there; durable on return.

    Raises:
        ConfigError: it can't be made; StorageError if the disk is full.
    """
    try:
        if not folder.is_dir():
            folder.mkdir(mode=PRIVATE_DIR_MODE)
            sync_directory(folder.parent)
    except OSError as error:
        raise write_failed(folder, error) from error


def remove(path: Path) -> bool:
    """Remove a file, or log why it can't be removed; return whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        LOG.warning("a file can't be removed", extra={"kv": {"file": path, "reason": error.strerror}})
        return False
    return True
