"""Back up the owner's directory, and restore it without going back behind the fleet.

The fleet may have gone on since the backup: devices were approved or revoked, runs were signed, secrets were drawn. A
directory that was merely copied back would sign a second roster of a sequence that the fleet has seen, list devices that are
revoked, and use run numbers again. So:

    the broker holds a newer roster of this owner's    refused, unless the newest roster is given (the aggregator has it)
                                                       or the owner accepts the loss (``older``)
    no broker answers                                  refused, unless ``offline``
    in every case                                      new secrets, a roster beyond all that are known, and run numbers
                                                       after a gap

The files are written beside the target and renamed into place last: a failure leaves nothing there.

Example: a backup of roster 7, and roster 9 on the broker, by which dev-3 was revoked. With the aggregator's roster.signed the
restored fleet signs roster 10, in which dev-3 is revoked. With ``older`` it signs roster 10 with dev-3 in it.

`pack` makes a backup of the directory: all of its files in one, encrypted under a passphrase.

- A backup is complete: the owner's key, secrets, roster, receiving keys, grants, tokens, the broker's users and the runs.
- It is as secret as the directory. The passphrase is the fleet's if it has one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from crypto.seal.passphrase import Lock
from shoal.errors import BrokerUnreachableError, ConfigError, IntegrityError, UntrustedError
from shoal.membership.backup import BACKUP_VERSION, Backup, decoded, files_of, write_files
from shoal.owner.enrolment.connection import OwnerConnection
from shoal.owner.keys.directory import RUNS_AFTER_RESTORE, FleetDirectory
from shoal.owner.keys.vault import is_under_passphrase
from shoal.protocol.codec import encode
from shoal.util.files import sync_directory

NEWER_HINT: Final = (
    "give the newest roster, which the aggregator has: --roster SERVER_DIR/roster.signed. If it is lost: --older, and then "
    "revoke again those that were revoked, and approve again those that were approved since the backup"
)
OFFLINE_HINT: Final = "start the broker; or --offline, which does not compare with the fleet"
TARGET_HINT: Final = "give a new directory; the old one may still be complete"


def restore(
    backup: Backup,
    directory: Path,
    lock: Lock,
    complain: Callable[[str], None],
    *,
    roster: bytes | None = None,
    older: bool = False,
    offline: bool = False,
) -> FleetDirectory:
    """Write a backup's files to ``directory``, sign a roster beyond those that the fleet has seen, and return the fleet.

    Args:
        backup: its contents.
        directory: a directory that is missing or empty.
        lock: the passphrase under which the backup was made.
        complain: called with warnings.
        roster: the newest roster as signed, from the aggregator's directory; None takes the backup's.
        older: accept that the backup's roster is older than the fleet's.
        offline: do not ask the broker, and leave room for the rosters that may have been signed since the backup.

    Raises:
        ConfigError: ``directory`` holds files already, or devices of the newest roster are known neither to the backup nor
            to the broker.
        UntrustedError: the fleet has seen a newer roster than the backup's, or the given roster is not this fleet's newest.
        BrokerUnreachableError: the broker does not answer.
    """
    with _beside(directory) as folder:
        write_files(backup, folder)
        passphrase = lock if is_under_passphrase(folder) else None
        fleet = FleetDirectory(folder, passphrase)
        if roster is not None:
            fleet.adopt(roster)
        seen = (
            fleet.roster.sequence + RUNS_AFTER_RESTORE if offline else _newest_at_broker(fleet, complain, older=older)
        )
        _check_receiving(fleet)
        fleet.sign_beyond(seen)
        folder.rename(directory)
        sync_directory(directory.parent)
    return FleetDirectory(directory, passphrase)


@contextmanager
def _beside(directory: Path) -> Iterator[Path]:
    """Yield a folder for the files next to ``directory``, and remove it afterwards if it is still there."""
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        raise ConfigError(f"{directory} exists already", hint=TARGET_HINT)
    target = directory.absolute()
    folder = target.with_name(f".{target.name}.restoring")
    shutil.rmtree(folder, ignore_errors=True)  # of a restore that was killed
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _newest_at_broker(fleet: FleetDirectory, complain: Callable[[str], None], *, older: bool) -> int:
    """Return the sequence of the owner's newest roster at the broker, 0 if it has none, and take the devices' newest keys."""
    ours = fleet.roster.sequence
    try:
        with OwnerConnection(fleet, lambda _: None) as connection:
            registrar = connection.registrar
            connection.look_for_roster()
            registrar.take_receiving()
            seen = registrar.newest_roster
    except BrokerUnreachableError as error:
        error.hint = OFFLINE_HINT
        raise
    if not seen:
        complain("warning: the broker holds no roster of this fleet, so that nothing tells how old the backup is")
    if seen > ours and not older:
        raise UntrustedError(
            f"the fleet has roster {seen}, and the newest here is {ours}: devices were approved, revoked or renamed since",
            hint=NEWER_HINT,
        )
    if seen > ours:
        complain(
            f"warning: roster {ours} is older than the fleet's {seen}: revoke again those that were revoked since, and approve "
            "again those that were approved since"
        )
    return seen


def _check_receiving(fleet: FleetDirectory) -> None:
    """Check that each device has a key to which secrets can be sealed.

    Raises:
        ConfigError: some have none.
    """
    lost = [name for name in fleet.roster.active() if name not in fleet.receiving.devices]
    if lost:
        raise ConfigError(
            f"no receiving keys of {', '.join(lost[:8])} in the backup or at the broker: approved since the backup",
            hint="start them, which publishes their keys, and restore again while the broker runs",
        )


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
