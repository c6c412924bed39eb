"""`shoal-fleet status`: the aggregator's answer, and beside it the owner's knowledge of the fleet; `report` writes a run's page.

Without an answer it is unknown whether the aggregator runs and which devices are online, so the record says neither, and one
problem says who did not answer and the consequence. No device is blamed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shoal.errors import BrokerUnreachableError, NotReadyError, ShoalError
from shoal.owner.cli.pairs import Directory
from shoal.owner.keys.settings import settings_of
from shoal.owner.keys.unlock import open_fleet
from shoal.util.console import note, say_result, second, working
from shoal.util.options import AsJson

if TYPE_CHECKING:
    from aggregator.status.record import FleetStatus
    from shoal.owner.keys.directory import FleetDirectory

LISTEN_S: Final = 2.0
"""Time for the broker to send pending enrolment requests."""
BROKER_DOWN: Final = (
    "start the broker, or mend the network to it: runs make no progress meanwhile, and aggregator and devices connect again by "
    "themselves"
)


def status(
    directory: Directory,
    json: AsJson = False,
) -> None:
    """Print the state of the fleet: aggregator, run, devices, pending approvals, roster and keys, with advice."""
    fleet = open_fleet(directory)
    pending, trouble = _pending(fleet)
    answer, answered_at_s = None, None
    if trouble is None:
        try:
            answer, answered_at_s = _answer(fleet)
        except (BrokerUnreachableError, NotReadyError) as error:
            trouble = error
    owner = _owner(fleet, pending, answered_at_s)
    record = _unanswered(fleet, trouble) if answer is None else answer
    unknown = {"running": None, "connected": None} if answer is None else {}
    say_result(
        {**record.document(), **unknown, "owner": owner},
        *_lines(record, answered=answer is not None),
        *_owner_lines(owner),
        *_order_lines(fleet),
        as_json=json,
    )


def _pending(fleet: FleetDirectory) -> tuple[list[dict[str, Any]] | None, ShoalError | None]:
    """Return the pending enrolment requests, None if the broker can't be reached, and the error then."""
    from shoal.owner.enrolment.connection import OwnerConnection

    try:
        with OwnerConnection(fleet, note) as connection:
            connection.listen(LISTEN_S, lambda: True)
            found = connection.registrar.pending.values()
            return [
                {"name": r.name, "fingerprint": r.fingerprint, "asked_at": second(r.asked_at_s)}
                for r in sorted(found, key=lambda r: r.name)
            ], None
    except BrokerUnreachableError as error:
        return None, error


def _answer(fleet: FleetDirectory) -> tuple[FleetStatus, int]:
    from aggregator.status.answers import decoded
    from aggregator.status.record import FleetStatus
    from shoal.owner.console.asking import ask
    from shoal.protocol.requests import RequestAction

    document, answered_at_s = ask(fleet, settings_of(fleet.path).wait, note, RequestAction.STATUS)
    return decoded(FleetStatus, document), answered_at_s


def _unanswered(fleet: FleetDirectory, trouble: ShoalError | None) -> FleetStatus:
    """Return the record of a fleet whose aggregator has not answered."""
    from aggregator.status.facts import DeviceStatus
    from aggregator.status.record import FleetStatus, Problem

    assert trouble is not None, "there is no answer for a reason"
    advice = BROKER_DOWN if isinstance(trouble, BrokerUnreachableError) else trouble.hint
    problem = Problem(f"{trouble}: the state of aggregator, run and devices is unknown", advice)
    devices = tuple(DeviceStatus(name=name) for name in fleet.roster.active())
    return FleetStatus(
        fleet=fleet.name,
        running=False,
        connected=False,
        broker=fleet.broker,
        since_s=None,
        problems=(problem,),
        run=None,
        devices=devices,
    )


def _owner(fleet: FleetDirectory, pending: list[dict[str, Any]] | None, answered_at_s: int | None) -> dict[str, Any]:
    from shoal.owner.keys.vault import highest_run

    roster = fleet.roster
    return {
        "fingerprint": fleet.fingerprint,
        "answered_at": None if answered_at_s is None else second(answered_at_s),
        "roster": roster.sequence,
        "roster_issued_at": second(roster.issued_at_s),
        "roster_expires_at": second(roster.expires_at_s),
        "roster_expired": time.time() > roster.expires_at_s,
        "key_version": roster.keys_since,
        "devices": roster.active_count,
        "revoked": list(roster.revoked),
        "pending": pending,
        "last_signed_run": highest_run(fleet.path) or None,
    }


def _lines(record: FleetStatus, *, answered: bool) -> list[str]:
    from aggregator.status import text

    head = f"fleet {record.fleet}, aggregator: {text.state_words(record) if answered else 'no answer'}"
    lines = [head, *text.problem_lines(record)]
    if answered:
        lines += [*text.worker_lines(record), *text.device_lines(record), *text.version_lines(record)]
        lines += [text.run_words(record.run)] if record.run is not None else ["no run is at the aggregator"]
        lines += text.cluster_lines(record)
    return lines


def _owner_lines(owner: dict[str, Any]) -> list[str]:
    ends = "expired" if owner["roster_expired"] else "expires"
    lines = [f"roster {owner['roster']}, {ends} {owner['roster_expires_at']}, key version {owner['key_version']}"]
    if owner["roster_expired"]:
        lines.append("  hint: shoal-fleet renew FLEET_DIR, then shoal-fleet publish FLEET_DIR")
    if owner["pending"] is None:
        return [*lines, "pending approvals: unknown"]
    lines.append(f"pending approvals: {len(owner['pending'])}")
    for request in owner["pending"]:
        lines.append(f"  {request['name']} {request['fingerprint']}, asked {request['asked_at']}")
        lines.append(f"    hint: shoal-fleet approve FLEET_DIR {request['fingerprint']}")
    return lines


def _order_lines(fleet: FleetDirectory) -> list[str]:
    from shoal.owner.runs.standing import last_run, order_in_force

    plan = order_in_force(fleet)
    if plan is None:
        return []
    return [
        f"standing order, runs {plan.run} to {last_run(plan)}: shoal-fleet schedule list FLEET_DIR says what the next waits for"
    ]


def report(
    run: Annotated[
        Path, typer.Argument(help="The run's directory at the aggregator, such as server/run-000001, or a copy of it.")
    ],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, .html.", dir_okay=False)],
    json: AsJson = False,
) -> None:
    """Write a run's pictures as one HTML file: clusters, accuracy and loss, cosines, participation, bytes and times.

    A running aggregator shows the same page live, with the fleet's state: shoal-aggregator serve --http; it can be saved there.
    """
    from shoal.owner.runs.report import run_report

    with working("reading the rounds"):
        run_report(run, out)
    say_result({"run": str(run), "file": str(out), "bytes": out.stat().st_size}, str(out), as_json=json)
