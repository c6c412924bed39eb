"""`shoal-fleet doctor`: the health checks of the owner's directory and its connection."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from aggregator.rounds.standstill import NAMES_SHOWN, named
from shoal.errors import ShoalError
from shoal.membership.backup import backup_check
from shoal.membership.doctor import broker_checks, local_checks, roster_check
from shoal.owner.broker.address import owner_address
from shoal.owner.enrolment.connection import OwnerConnection
from shoal.owner.keys.run_list import signed_plans
from shoal.owner.keys.unlock import open_fleet
from shoal.owner.keys.vault import is_under_passphrase
from shoal.protocol.topics import TopicKind, Topics
from shoal.util.console import Check, checked, counted, ok
from shoal.version import versions

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.owner.enrolment.admission import Registrar
    from shoal.owner.keys.directory import FleetDirectory


def diagnose(directory: Path) -> list[Check]:
    """Return the checks of an owner's directory; asks for the passphrase if its key is under one.

    Args:
        directory: the owner's.
    """
    try:
        fleet = open_fleet(directory)
    except ShoalError as error:
        failed = Check("fleet", "failure", str(error), error.hint)
        return [failed, *local_checks(directory)] if directory.is_dir() else [failed]
    here = [
        _fleet(fleet),
        *local_checks(fleet.path),
        roster_check(fleet.roster),
        _devices(fleet),
        checked("runs", lambda: _runs(fleet)),
        checked("backup", lambda: backup_check("shoal-fleet", fleet.path, fleet.roster.sequence, int(time.time()))),
        ok("versions", versions()),
    ]
    try:
        address = owner_address(fleet)
    except ShoalError as error:
        return [*here, Check("broker", "failure", str(error), error.hint)]
    topics, token = Topics(fleet.name), f"doctor-{secrets.token_hex(8)}"
    own = topics.filter(TopicKind.ENROL), topics.enrol(token)
    reached = broker_checks(address, f"shoal-{fleet.name}-owner-doctor", (), own)
    if reached[0].result == "failure":
        return [*here, *reached]
    return [*here, *reached, *_at_broker(fleet)]


def _fleet(fleet: FleetDirectory) -> Check:
    detail = f"fleet {fleet.name}, {counted(len(fleet.roster.active()), 'device')}"
    if fleet.roster.aggregator is None:
        return Check("fleet", "warning", f"{detail}, no aggregator", "shoal-fleet add-aggregator DIR CARD")
    guarded = "under" if is_under_passphrase(fleet.path) else "without"
    return ok("fleet", f"{detail}, its keys {guarded} a passphrase")


def _devices(fleet: FleetDirectory) -> Check:
    """Check that each device has an unused key to which secrets can be sealed."""
    exhausted = [name for name in fleet.roster.active() if fleet.receiving.of(name).exhausted]
    if exhausted:
        detail = f"no unused receiving keys are known of {named(exhausted)}"
        return Check("devices", "warning", detail, f"start them, then shoal-fleet publish {fleet.path}")
    return ok("devices", f"{counted(len(fleet.roster.active()), 'device')} can be sent new secrets")


def _runs(fleet: FleetDirectory) -> Check:
    damaged: list[str] = []
    plans = signed_plans(fleet, damaged.append)
    if damaged:
        return Check("runs", "warning", "; ".join(damaged), "take these files out of the folder runs")
    return ok("runs", f"{len(plans)} signed")


def _at_broker(fleet: FleetDirectory) -> list[Check]:
    """Return the checks of the messages that the broker retains."""
    complaints: list[str] = []
    try:
        with OwnerConnection(fleet, complaints.append) as connection:
            registrar = connection.registrar
            connection.look_for_roster()
            return [_published(fleet, registrar), _requests(fleet, registrar, complaints)]
    except ShoalError as error:
        return [Check("published", "failure", str(error), error.hint)]


def _published(fleet: FleetDirectory, registrar: Registrar) -> Check:
    seen, ours = registrar.newest_roster, fleet.roster.sequence
    publish = f"shoal-fleet publish {fleet.path}"
    if registrar.overtaken:
        detail = f"the broker holds roster {seen} of this owner's, which is not here (roster {ours})"
        return Check(
            "published", "failure", detail, "was this directory copied or restored? `restore` goes on beyond it"
        )
    if not seen:
        return Check("published", "warning", "the broker holds no roster of this fleet", publish)
    if seen < ours:
        return Check("published", "warning", f"the broker holds roster {seen}, the newest is {ours}", publish)
    return ok("published", f"the broker holds roster {seen}, the newest")


def _requests(fleet: FleetDirectory, registrar: Registrar, complaints: list[str]) -> Check:
    waiting = sorted(request.name for request in registrar.pending.values())
    if waiting:
        detail = f"{named(waiting)} wait for approval"
        return Check("requests", "warning", detail, f"shoal-fleet devices {fleet.path} lists their fingerprints")
    if complaints:
        return Check("requests", "warning", "; ".join(complaints[:NAMES_SHOWN]))
    return ok("requests", "no device waits for approval")
