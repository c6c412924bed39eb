"""The owner's own machine: `shoal-fleet backup`, `restore` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.owner.cli.pairs import Directory
from shoal.owner.keys.unlock import ask
from shoal.util.console import note, say_result, working
from shoal.util.files import read_limited, write_atomic
from shoal.util.options import AsJson

if TYPE_CHECKING:
    from crypto.seal.passphrase import Lock

SUBJECT = "the backup"


def backup(
    directory: Directory,
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.", dir_okay=False)],
    json: AsJson = False,
) -> None:
    """Write the owner's directory to one file, encrypted under a passphrase: that of the owner's key if there is one.

    Make one after each init, approve, revoke, rotate and run, and store it on another machine. Without the passphrase it
    can't be read by anyone.
    """
    from shoal.membership.backup import check_new_file, record, tell
    from shoal.owner.enrolment.recovery import pack
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.owner.keys.vault import is_under_passphrase

    locked = is_under_passphrase(directory)
    check_new_file(file, directory)
    lock: Lock = ask() if locked else ask(SUBJECT, twice=True)
    fleet = FleetDirectory(directory, lock if locked else None)
    with working("encrypting the backup"):
        made, data = pack(fleet, lock)
        write_atomic(file, data)
    record(directory, made)
    tell(file, made, as_json=json)
    note("store it on another machine; try it once: shoal-fleet restore NEW_DIR FILE --check")


def restore(
    directory: Annotated[Path, typer.Argument(help="New directory for the owner's files; missing or empty.")],
    file: Annotated[Path, typer.Argument(help="A file that `backup` wrote.", exists=True, dir_okay=False)],
    roster: Annotated[
        Path | None,
        typer.Option(
            help="The fleet's newest roster: roster.signed in the aggregator's directory.", exists=True, dir_okay=False
        ),
    ] = None,
    older: Annotated[
        bool,
        typer.Option("--older", help="Go on with the backup's list of devices, although the fleet has a newer one."),
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not compare with the fleet at the broker.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only open the backup and print its figures.")] = False,
    json: AsJson = False,
) -> None:
    """Write a backup's files to a new directory, and sign a roster beyond those that the fleet has seen.

    New secrets are drawn and run numbers continue after a gap, so that no mask is repeated. It refuses to go back behind the
    fleet: if devices were approved or revoked since the backup, give the aggregator's roster.
    """
    from shoal.membership.backup import MAX_FILE_BYTES
    from shoal.owner.enrolment.recovery import restore as restored
    from shoal.owner.enrolment.recovery import unpack
    from shoal.util.console import second

    data = read_limited(file, MAX_FILE_BYTES)
    newest = None if roster is None else read_limited(roster, MAX_FILE_BYTES)
    lock = ask(SUBJECT)
    with working("opening the backup"):
        found = unpack(data, lock)
    figures = {
        "fleet": found.fleet,
        "backup_roster": found.roster,
        "made_at": second(found.made_at_s),
        "files": len(found.files),
    }
    if check:
        text = f"fleet {found.fleet}, roster {found.roster}, of {figures['made_at']}, {len(found.files)} files"
        say_result(figures, text, as_json=json)
        return
    with working("comparing with the fleet and writing the files"):
        fleet = restored(found, directory, lock, note, roster=newest, older=older, offline=offline)
    say_result(
        {**figures, "directory": str(directory), "roster": fleet.roster.sequence},
        f"{directory}: fleet {fleet.name}, roster {fleet.roster.sequence}, new secrets",
        as_json=json,
    )
    note(f"next: shoal-fleet show {directory}, compare the devices, then shoal-fleet publish {directory}")
    note("end any other copy of this directory: two copies sign different rosters")


def doctor(directory: Directory, json: AsJson = False) -> None:
    """Check keys, disk, clock, roster, devices, runs, backup, broker and TLS; exit status 10 on a failure."""
    from shoal.owner.doctor import diagnose
    from shoal.util.console import report

    with working("checking files and broker"):
        found = diagnose(directory)
    report(found, as_json=json)


COMMANDS = (backup, restore, doctor)
