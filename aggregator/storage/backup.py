"""A backup of an aggregator's or a worker's directory: keys, membership, roster and the owner's orders in one private file.

- The file is a SHA-256 and the message `shoal.membership.backup.Backup`. It is as secret as the directory.
- It is made while the program runs: each file is replaced as a whole, and is read before those that may be newer than it.
- It has no run. Devices refuse rounds that they have done already, so the run in progress ends with a restore.
- Between backup and restore the owner may have sent requests. A restored aggregator refuses those made before the restore.

Example: ``save(directory, file)`` writes a backup; ``restore(file, again)`` makes a directory from which the aggregator goes on.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Final

from aggregator.membership import RUNS_DIRECTORY, TOLD_FILE
from aggregator.storage.signed_runs import CHOICE_FILE, ORDER_FILE, ORDERS_FILE, read_orders, write_orders
from shoal.digests import sha256
from shoal.errors import ConfigError, IntegrityError, UntrustedError
from shoal.membership import backup as backups
from shoal.membership.directory import (
    GRANT_FILE,
    KEY_FILE,
    LEAST_FILE,
    NEXT_FILE,
    ROSTER_FILE,
    Membership,
    least_roster,
)
from shoal.protocol.codec import encode
from shoal.protocol.documents import AggregatorGrant
from shoal.util.files import private_directory, read_limited, write_atomic

SAVED: Final = (KEY_FILE, LEAST_FILE, ROSTER_FILE, f"{NEXT_FILE}.*", GRANT_FILE, ORDERS_FILE, CHOICE_FILE, ORDER_FILE)
"""Files of a backup in the order of reading: of two that belong together, first the one that the running program writes last."""
DIGEST_BYTES: Final = 32


def save(directory: Path, file: Path) -> backups.Backup:
    """Write a backup of ``directory`` to ``file``, a new one, and return it; the program may run meanwhile.

    Raises:
        NotEnrolledError: the directory holds no membership.
        ConfigError: the file exists or can't be written, or a file of the directory can't be read.
    """
    backups.check_new_file(file, directory)
    member = Membership(directory, AggregatorGrant, expired=True)
    # A program that has told the fleet a roster asks the broker for the owner's newest one before it publishes anything.
    files = (*backups.files_of(directory, *SAVED), backups.BackupFile(TOLD_FILE, encode(member.roster)))
    made = backups.Backup(backups.BACKUP_VERSION, member.fleet, member.roster.sequence, int(time.time()), files)
    plain = encode(made)
    write_atomic(file, sha256(plain), plain)
    backups.record(directory, made)
    return made


def restore(file: Path, directory: Path) -> backups.Backup:
    """Write a backup's files to ``directory``, a missing or an empty one, and return the backup.

    Raises:
        IntegrityError: it is no backup of an aggregator, damaged, or of another version.
        ConfigError: the directory holds files.
        UntrustedError: the directory has a newer roster than the backup, or the backup's roster is not its owner's.
    """
    data = read_limited(file, backups.MAX_FILE_BYTES)
    if data[:DIGEST_BYTES] != sha256(data[DIGEST_BYTES:]):
        raise IntegrityError(
            f"{file} is no backup of an aggregator, or is damaged", hint="shoal-aggregator backup DIR FILE writes one"
        )
    made = backups.decoded(data[DIGEST_BYTES:])
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        newest, _ = least_roster(directory)
        if newest > made.roster:
            raise UntrustedError(
                f"{directory} has roster {newest}, and the backup is of roster {made.roster}: it is older",
                hint="start the program in that directory as it is: shoal-aggregator doctor DIR",
            )
        raise ConfigError(f"{directory} exists already", hint="give a new directory; the old one may still be complete")
    try:
        backups.write_files(made, directory)
        private_directory(directory / RUNS_DIRECTORY)
        Membership(directory, AggregatorGrant, expired=True)
        write_orders(directory, dataclasses.replace(read_orders(directory), restored_at_s=int(time.time())))
        backups.record(directory, made)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return made
