"""The owner's standing order: the newest signed run, if it is one, and its signature under newer keys.

An order stays in force until its time is over, a later run is signed, or the owner stops it. Its package is sealed under the keys
of one version. When the owner draws others, the same order is signed again: number, id, turns and end stay.
"""

from __future__ import annotations

import dataclasses
import re
import time
from datetime import UTC, datetime, timedelta
from os import urandom
from typing import TYPE_CHECKING, Final

from crypto.mask.schedule import VersionKey
from crypto.seal.envelope import GroupKey, open_from_group, read_head
from edge_client.run.policy import origins_purpose, task_purpose
from shoal.errors import ConfigError, IntegrityError, ShoalError, UsageError, WireError
from shoal.limits import MAX_INTERVAL_S
from shoal.membership.signed_plans import open_package
from shoal.owner.enrolment.tokens import seconds
from shoal.owner.keys.vault import highest_run, run_file
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage, RunPlan, Schedule
from shoal.util.console import day
from shoal.util.files import read_if_there, read_private, write_atomic

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory

STOPPED_FILE: Final = "schedule.stopped"
"""Id of the standing order that the owner has stopped last, in hex."""


def signed_schedule(fleet: FleetDirectory, every: str, at_most: int | None, until: str, grows: str = "") -> Schedule:
    """Return the schedule of a standing order with a new id.

    Raises:
        UsageError: --every, --at-most, --until or --when-data-grows can't be read, or one is missing.
        ConfigError: the order would outlast the roster.
    """
    interval_s = seconds(every, MAX_INTERVAL_S)
    if at_most is None:
        raise UsageError("--at-most is missing", hint="a standing order has a largest number of runs: --at-most 30")
    growth = re.fullmatch(r"([1-9][0-9]{0,2}|1000)%?", grows)
    if grows and growth is None:
        raise UsageError(f"--when-data-grows {grows}: per cent from 1 to 1000 are wanted", hint="such as 20%")
    expires_s = fleet.roster.expires_at_s
    try:
        end = datetime.strptime(until, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=1) if until else None
    except ValueError as error:
        raise UsageError(f"--until {until}: a date is wanted", hint="such as 2027-06-30") from error
    until_s = expires_s if end is None else int(end.timestamp())
    if until_s > expires_s:
        raise ConfigError(
            f"the roster expires on {day(expires_s)}, before {until}",
            hint="shoal-fleet renew, then publish; or end earlier",
        )
    if until_s <= time.time():
        raise UsageError(f"--until {until} is over", hint="give a later date")
    try:
        return Schedule(
            order=urandom(16),
            count=at_most,
            interval_s=interval_s,
            until_s=until_s,
            growth=0 if growth is None else int(growth[1]),
        )
    except WireError as error:
        raise UsageError(str(error)) from error


def last_run(plan: RunPlan) -> int:
    """Return the number of the last run that a standing order may have."""
    return plan.run + (0 if plan.schedule is None else plan.schedule.count - 1)


def order_in_force(fleet: FleetDirectory) -> RunPlan | None:
    """Return the plan of the standing order in force, as signed; None without one.

    Raises:
        ShoalError: the file of the newest run is damaged.
    """
    path = run_file(fleet.path, highest_run(fleet.path))
    if not path.exists():
        return None
    plan = open_package(decode(read_private(path), RunPackage), fleet.owner.member.sign_key)
    stopped = read_if_there(fleet.path / STOPPED_FILE) or b""
    if plan.schedule is None or plan.schedule.until_s < time.time() or stopped.decode() == plan.schedule.order.hex():
        return None
    return plan


def note_stopped(fleet: FleetDirectory, plan: RunPlan) -> None:
    """Record, durably, that the owner has stopped a standing order: it is not signed again."""
    assert plan.schedule is not None
    write_atomic(fleet.path / STOPPED_FILE, plan.schedule.order.hex().encode())


def sign_again(fleet: FleetDirectory) -> RunPlan | None:
    """Sign the standing order in force under the fleet's newest keys, and for its workers; return it, or None without one.

    The same call again changes nothing. Call it in `FleetDirectory.changing`.

    Raises:
        IntegrityError: the version of keys that sealed it is not stored any more.
    """
    from shoal.owner.runs.plan import write_package

    before = order_in_force(fleet)
    if before is None or before.key_version == fleet.roster.keys_since:
        return before
    parts = decode(read_private(run_file(fleet.path, before.run)), RunPackage)
    secret = next((v.version_secret for v in fleet.versions if v.number == before.key_version), None)
    if secret is None:
        raise IntegrityError(
            f"the keys of the standing order of run {before.run} are not stored any more",
            hint="sign another: shoal-fleet schedule",
        )
    version = VersionKey(fleet.name, before.key_version, secret)
    task = _opened(fleet, version, *before.task_run, parts.task, task_purpose(before.task_digest))
    origins = _opened(fleet, version, before.run, before.run_id, parts.origins, origins_purpose(before.run_id))
    workers = fleet.workers if before.keeper is None else ()
    plan = dataclasses.replace(
        before, key_version=fleet.roster.keys_since, roster_sequence=fleet.roster.sequence, workers=workers
    )
    write_package(fleet, plan, task, origins)
    return plan


def _opened(fleet: FleetDirectory, version: VersionKey, run: int, run_id: bytes, sealed: bytes, purpose: str) -> bytes:
    """Return a part of a run package in clear."""
    head, at = read_head(sealed)
    if head.purpose != purpose:
        raise ShoalError(f"a sealed {head.purpose} in the package of run {run}")
    group = GroupKey(fleet.name, "content", version.peek_run(run, run_id).content)
    return bytes(open_from_group(group, sealed, head, at, fleet.owner.member.sign_key))
