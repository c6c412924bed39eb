"""`shoal-aggregator doctor`: the health checks of an aggregator."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from aggregator.config import AggregatorConfig
from aggregator.membership import AggregatorMembership
from aggregator.rounds.standstill import named
from aggregator.status.record import REVOKED, FleetStatus
from aggregator.status.stored import fleet_status
from aggregator.status.text import state_words
from aggregator.storage.signed_runs import RunFiles, directory_of
from aggregator.storage.store import read_records
from shoal.errors import ShoalError
from shoal.membership.backup import backup_check
from shoal.membership.doctor import local_checks, membership_checks
from shoal.util.console import Check, checked, ok
from shoal.version import VERSION, versions


def diagnose(config: AggregatorConfig) -> list[Check]:
    """Return the checks of an aggregator; its daemon may be running."""
    directory = config.dir
    try:
        member = AggregatorMembership(directory)
    except ShoalError as error:
        return [Check("membership", "failure", str(error), error.hint), *local_checks(directory)]
    devices = len(member.roster.active())
    status = fleet_status(member, ())
    return [
        ok("membership", f"aggregator of fleet {member.fleet}, devices: {devices}"),
        *local_checks(directory),
        *membership_checks(member, "aggregator", config),
        _service(status),
        _devices(status),
        checked("runs", lambda: _runs(member)),
        checked(
            "backup",
            lambda: backup_check("shoal-aggregator", member.directory, member.roster.sequence, int(time.time())),
        ),
        _versions(status),
    ]


def _service(status: FleetStatus) -> Check:
    if status.running and status.connected and not status.problems:
        return ok("service", state_words(status))
    reasons = "; ".join([state_words(status), *(p.reason for p in status.problems)])
    advice = "; ".join(p.advice for p in status.problems) or "start it: shoal-aggregator serve DIR"
    return Check("service", "warning", reasons, advice)


def _devices(status: FleetStatus) -> Check:
    active = [d for d in status.devices if d.online is not None and d.reason != REVOKED]
    impaired = [d for d in active if d.reason]
    if not active:
        return ok("devices", "unknown while the aggregator is not connected")
    if not impaired:
        return ok("devices", f"{len(active)} online, none with a problem")
    reasons: dict[str, list[str]] = {}
    for device in impaired:
        reasons.setdefault(device.reason, []).append(device.name)
    detail = "; ".join(f"{reason}: {named(names)}" for reason, names in reasons.items())
    return Check("devices", "warning", detail, "`shoal-aggregator status` gives advice for each")


def _runs(member: AggregatorMembership) -> Check:
    """Read every run.

    Raises:
        IntegrityError: a run's directory is damaged.
    """
    refused: dict[str, str] = {}
    runs = RunFiles(member, refused.__setitem__).all()
    for run in runs:
        read_records(directory_of(member, run.plan.run))
    if refused:
        detail = "; ".join(f"{name} is no run of this fleet: {reason}" for name, reason in refused.items())
        return Check("runs", "warning", detail, "take these files out of the directory of runs")
    return ok("runs", f"{len(runs)} readable")


def _versions(status: FleetStatus) -> Check:
    found: Counter[Any] = Counter(d.version for d in status.devices if d.version)
    detail = versions()
    if set(found) - {VERSION}:
        others = ", ".join(f"{count} with {version}" for version, count in sorted(found.items()))
        advice = "`shoal-aggregator status` names them; docs/versions.md says in which order to upgrade"
        return Check("versions", "warning", f"{detail}; devices: {others}", advice)
    return ok("versions", detail)
