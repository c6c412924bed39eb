"""Read the owner's passphrase from a private file or the terminal, never from the command line."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Final

from crypto.seal.passphrase import Lock
from shoal.errors import ConfigError
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import is_under_passphrase
from shoal.util.files import read_private

FILE_VARIABLE: Final = "SHOAL_PASSPHRASE_FILE"


def ask(subject: str = "the owner's key", *, twice: bool = False) -> Lock:
    """Read the passphrase from the file that SHOAL_PASSPHRASE_FILE names, or ask at the terminal.

    Args:
        subject: the thing under the passphrase, for prompt and error.
        twice: ask at the terminal a second time, for a new passphrase.

    Raises:
        ConfigError: there is neither file nor terminal, the passphrase is too short, or the two entries differ.
    """
    named = os.environ.get(FILE_VARIABLE)
    if named:
        try:
            # Editors end a file with a newline, which is no part of the passphrase.
            return Lock(read_private(Path(named), follow=True).rstrip(b"\r\n"))
        except ConfigError as error:
            raise ConfigError(f"{FILE_VARIABLE}: {error}", hint=error.hint) from error
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{subject} is under a passphrase, and there is no terminal to ask at",
            hint=f"set {FILE_VARIABLE} to a file of mode 0600 that holds the passphrase",
        )
    text = getpass.getpass(f"Passphrase of {subject}: ")
    if twice and getpass.getpass("The same again: ") != text:
        raise ConfigError("the two passphrases differ")
    return Lock(text.encode())


def open_fleet(directory: Path) -> FleetDirectory:
    """Open the owner's directory; ask for the passphrase if its key is under one."""
    return FleetDirectory(directory, ask() if is_under_passphrase(directory) else None)
