"""A backup of the owner's directory: all of its files in one, encrypted under a passphrase.

- A backup is complete: the owner's key, secrets, roster, receiving keys, grants, tokens, the broker's users and the runs.
- It is as secret as the directory. The passphrase is the fleet's if it has one.
- `write_files` writes the contents into a new directory. What the fleet has seen since the backup is the caller's concern, see
  `shoal.owner.enrolment.recovery`.

Example: ``pack(fleet, lock)`` returns the contents and the bytes of the file; ``unpack(data, lock)`` returns the contents again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from shoal.errors import IntegrityError, UntrustedError
from shoal.membership.backup import BACKUP_VERSION, Backup, decoded, files_of
from shoal.protocol.codec import encode

if TYPE_CHECKING:
    from crypto.seal.passphrase import Lock
    from shoal.owner.keys.directory import FleetDirectory

PURPOSE: Final = "backup"


def pack(fleet: FleetDirectory, lock: Lock) -> tuple[Backup, bytes]:
    """Return the contents of a backup, and the bytes of its file.

    Raises:
        ConfigError: a file can't be read, or the directory holds more than MAX_BACKUP_BYTES.
    """
    with fleet.changing():
        files = tuple(files_of(fleet.path, "**/*"))
        backup = Backup(BACKUP_VERSION, fleet.name, fleet.roster.sequence, int(time.time()), files)
    return backup, lock.close(PURPOSE, encode(backup))


def unpack(data: bytes, lock: Lock) -> Backup:
    """Return the contents of a backup file.

    Raises:
        UntrustedError: the passphrase is wrong, or the file was altered.
        IntegrityError: it is no backup, or of another version.
    """
    try:
        plain = lock.open(PURPOSE, data)
    except IntegrityError as error:
        raise IntegrityError("this is no backup of a fleet", hint="shoal-fleet backup DIR FILE writes one") from error
    except UntrustedError as error:
        raise UntrustedError(str(error), hint="give the passphrase under which the backup was made") from error
    return decoded(plain)
