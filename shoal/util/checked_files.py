"""Private files that end with the SHA-256 of everything before, so that a torn or altered one is found.

Example: ``write_checked(path, b"head", b"body")``, and ``verified(path, read_private(path), "remove it")`` is ``b"headbody"``.
"""

from __future__ import annotations

from pathlib import Path

from shoal.digests import sha256
from shoal.errors import IntegrityError
from shoal.types import DIGEST_BYTES
from shoal.util.files import PRIVATE_DIR_MODE, sync_directory, write_atomic, write_failed


def write_checked(path: Path, head: bytes) -> None:
    """Write ``head`` and its SHA-256; durable on return.

    Raises:
        ConfigError: the file can't be written; StorageError if the disk is full.
    """
    write_atomic(path, head, sha256(head))


def verified(path: Path, data: bytes, hint: str) -> memoryview:
    """Return the bytes before the SHA-256 that ends ``data``.

    Args:
        path: the file, for the error.
        data: its bytes.
        hint: advice for the error.

    Raises:
        IntegrityError: the file is cut short, torn or altered.
    """
    content = memoryview(data)[:-DIGEST_BYTES]
    if sha256(content) != data[-DIGEST_BYTES:]:
        raise IntegrityError(f"{path} is damaged", hint=hint)
    return content


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
