"""Membership through the broker: `shoal-fleet invite`, `devices`, `approve`, `revoke`, `replace`, `rename` and the like."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import BrokerUnreachableError, NotReadyError, ShoalError, UsageError
from shoal.owner.cli import runs, schedules
from shoal.owner.cli.pairs import Directory, add_hint, broker_users
from shoal.owner.keys.settings import MOST_WAIT_S, settings_of
from shoal.owner.keys.unlock import open_fleet
from shoal.protocol.documents import SHOWN, Roster, RunPlan, read_labels, write_labels
from shoal.protocol.requests import RequestAction
from shoal.util.console import counted, note, say, say_json, say_result, second
from shoal.util.options import AsJson

if TYPE_CHECKING:
    from shoal.owner.enrolment.admission import Refused, Registrar
    from shoal.owner.enrolment.connection import OwnerConnection
    from shoal.owner.keys.directory import FleetDirectory

DeviceName = Annotated[str, typer.Argument(help="The device's name, or the one that it is shown under.")]
MOST_INVITED = 10_000
"""Most lines of one call."""
MOST_LISTED = 10
"""Refused requests that `approve` prints."""


def invite(
    directory: Directory,
    count: Annotated[int, typer.Option(help="Number of lines, each for one device.", min=1, max=MOST_INVITED)] = 1,
    expires: Annotated[str, typer.Option(help="Lifetime: 90s, 30m, 12h, 2d; at most 30d.")] = "30m",
    json: AsJson = False,
) -> None:
    """Print a line with which one device may request enrolment. It contains a secret: hand it over like a password.

    The device still has to be approved. No connection to the broker is needed.
    """
    from shoal.owner.enrolment.tokens import TokenStore, seconds

    span = seconds(expires)
    fleet = open_fleet(directory)
    now_s = int(time.time())
    made = TokenStore(fleet).issue(count, span, now_s)
    lines = [token.to_line() for token in made]
    say_result({"fleet": fleet.name, "lines": lines, "expires_at": second(now_s + span)}, *lines, as_json=json)
    note(f"owner {made[0].owner}, aggregator {made[0].aggregator}, broker {fleet.broker}")
    note(f"holds for {expires}, one line for one device: shoal-edge enrol DIR, then paste the line")
    if count > 1:
        note(f"next: shoal-fleet approve {directory} --all-invited, once the devices have asked")


def devices(
    directory: Directory,
    watch: Annotated[bool, typer.Option("--watch", help="Keep running, and print requests as they arrive.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove refused requests from the broker.")] = False,
    json: AsJson = False,
) -> None:
    """List pending enrolment requests, refused ones with the reason, and enrolled devices."""
    if watch and json:
        raise UsageError("--watch prints lines, --json one object: choose one")
    fleet = open_fleet(directory)
    with _connected(fleet) as connection:
        connection.listen(settings_of(directory).silence)
        data = _listing(fleet, connection.registrar)
        if clear:
            connection.registrar.clear_refused()
        connection.flush()
        say_result(data, *_lines(data), as_json=json)
        told = {_asked(r) for r in data["pending"]}
        while watch:
            connection.listen(1.0)
            for request in _listing(fleet, connection.registrar)["pending"]:
                if _asked(request) not in told:
                    told.add(_asked(request))
                    say(_pending(request))


def approve(
    directory: Directory,
    fingerprint: Annotated[
        list[str] | None,
        typer.Argument(help="A device's fingerprint, as the device prints it and `devices` lists it; repeatable."),
    ] = None,
    all_invited: Annotated[
        bool,
        typer.Option(
            "--all-invited",
            help="Approve each pending device that used one of this owner's lines, without comparing fingerprints: anyone "
            "who got hold of a line is enrolled. Requests that can't be approved are listed and refused, and their devices end.",
        ),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for requests.", min=0.1, max=MOST_WAIT_S, show_default="the setting's, 10"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Enrol the pending devices with these fingerprints: sign a roster that lists them, and publish their grants and the roster.

    For a device that is already in the roster, grant and roster are published again. Once a run is signed, new devices
    get new secrets, which are published for the other members as well.
    """
    wanted = [text.strip().lower() for text in fingerprint or ()]
    if bool(wanted) == all_invited:
        raise UsageError("give fingerprints or --all-invited", hint="`shoal-fleet devices DIR` lists who waits")
    fleet = open_fleet(directory)
    keys_since, wait_s = fleet.roster.keys_since, wait or settings_of(directory).wait
    with _connected(fleet) as connection:
        registrar = connection.registrar
        if all_invited:
            connection.listen(wait_s, lambda: bool(registrar.pending))
            registrar.refuse_unfit(int(time.time()))
            wanted = sorted(registrar.pending, key=lambda f: registrar.pending[f].name)
        else:
            connection.listen(wait_s, lambda: all(f in registrar.pending or registrar.listed(f) for f in wanted))
        _note_refused(registrar)
        if not wanted:
            connection.flush()
            raise NotReadyError("no invited device can be approved", hint="on the device: shoal-edge enrol DIR")
        try:
            members = connection.approve(wanted)
        except ShoalError as error:
            if all(map(registrar.listed, wanted)):
                again = f"shoal-fleet approve {directory} {' '.join(wanted)}"
                add_hint(error, f"it is signed and stored: {again} when the broker is back")
            raise
    enrolled = [{"name": member.name, "fingerprint": print_} for member, print_ in zip(members, wanted, strict=True)]
    refused = [_refused(r) for r in registrar.refused.values()]
    say_result(
        {"fleet": fleet.name, "roster": fleet.roster.sequence, "devices": enrolled, "refused": refused},
        *(f"{device['name']} {device['fingerprint']}" for device in enrolled),
        as_json=json,
    )
    if fleet.roster.keys_since > keys_since:
        schedules.send_again(fleet)
        note(f"{drawn_for(fleet, len(members))}: published at the broker")
    names = ", ".join(member.name for member in members)
    broker_users(fleet, f"accepts {names}, unless --device named it before", published=True)


def _note_refused(registrar: Registrar) -> None:
    """Print the refused requests; strangers may have made any number of them."""
    refused = list(registrar.refused.values())
    for each in refused[:MOST_LISTED]:
        note(f"refused {each.name}, line {each.token}: {each.reason}{f'; {each.hint}' if each.hint else ''}")
    if len(refused) > MOST_LISTED:
        note(
            f"refused {len(refused) - MOST_LISTED} more: `shoal-fleet devices DIR` lists them, and --clear removes them"
        )


def reject(
    directory: Directory,
    request: Annotated[str, typer.Argument(help="Fingerprint, name or line of the request, as `devices` lists it.")],
    json: AsJson = False,
) -> None:
    """Refuse a device's request: the device is told and ends, and its enrolment line admits nobody any more."""
    fleet = open_fleet(directory)
    with _connected(fleet) as connection:
        connection.listen(settings_of(directory).wait, lambda: connection.registrar.knows(request.strip()))
        name = connection.registrar.reject(request.strip())
        connection.flush()
    say_result({"rejected": name}, f"{name} rejected", as_json=json)


def revoke(
    directory: Directory,
    device: DeviceName,
    json: AsJson = False,
) -> None:
    """Remove a device from the fleet for good: its keys are never accepted again, its name only by `replace`.

    Signs a roster without it and draws new secrets, sealed to each remaining party. Once the aggregator has them it ignores
    the device, and opens the next round under the new keys: the device can read nothing that is broadcast from then on, but
    still has the models that it read before. A run that was signed before and starts later begins under the new keys; sign it
    again only if a later run has already started.
    """
    fleet, offline = open_fleet(directory), settings_of(directory).offline
    device = fleet.named(device)
    fleet.revoke(device)
    revoked = {"device": device, "roster": fleet.roster.sequence, "published": not offline}
    if not json:
        say(f"{device} revoked by roster {fleet.roster.sequence}")
    _note_too_few(fleet)
    broker_users(fleet, f"shuts {device} out", published=not offline)
    _publish_signed(fleet, f"publish {directory}, or carry roster.signed and grants/ to the others")
    if json:
        say_json(revoked)


def _note_too_few(fleet: FleetDirectory) -> None:
    """Print a warning if the newest run takes means of more devices than are left, unless the aggregator says that it is over."""
    from shoal.owner.keys.run_list import signed_plans

    plans = signed_plans(fleet, lambda _complaint: None)
    left = fleet.roster.active_count
    if plans and left < plans[-1].recipe.min_contributors and not _is_over(fleet, plans[-1]):
        note(
            f"warning: {counted(left, 'device')} left, and run {plans[-1].run} takes means of "
            f"{plans[-1].recipe.min_contributors}: if it is under way, it waits until another device is admitted"
        )


def _is_over(fleet: FleetDirectory, plan: RunPlan) -> bool:
    """Ask the aggregator whether a run is over; False if no answer comes."""
    if settings_of(fleet.path).offline:
        return False
    try:
        found = runs.answer(fleet, RequestAction.LIST).runs
    except ShoalError:
        return False
    return any(run.run_id == plan.run_id and run.phase == "finished" for run in found)


def replace(
    directory: Directory,
    device: DeviceName,
    fingerprint: Annotated[
        str, typer.Argument(help="The fingerprint that the device prints, to compare it.", show_default="not compared")
    ] = "",
    json: AsJson = False,
) -> None:
    """Put a device that was installed again in its old place: the same name and labels with new keys, the old ones burned.

    Waits for its request under the old name, and signs one roster: the old keys are never accepted again, all parties get new
    secrets, and the device takes part from the next round on, like a newcomer. It may have been revoked before.
    """
    from crypto.seal.identity import fingerprint as fingerprint_of

    fleet, wanted = open_fleet(directory), fingerprint.strip().lower()
    name = fleet.named(device)
    with _connected(fleet) as connection:
        asked = lambda: any(r.name == name for r in connection.registrar.pending.values())  # noqa: E731
        connection.listen(settings_of(directory).wait, asked)
        try:
            member = connection.replace(name, wanted)
        except BrokerUnreachableError as error:
            add_hint(
                error, "the same command goes on when the broker is back, or shoal-fleet publish once it is signed"
            )
            raise
    print_ = fingerprint_of(member)
    say_result({"name": name, "fingerprint": print_, "roster": fleet.roster.sequence}, f"{name} {print_}", as_json=json)
    schedules.send_again(fleet)
    broker_users(fleet, f"accepts {name} again, by another password", published=True)


def rename(
    directory: Directory,
    device: DeviceName,
    name: Annotated[str, typer.Argument(help="The name to show; the device's own name again to show that.")],
    json: AsJson = False,
) -> None:
    """Show a device under another name in status, page and lists; commands take either.

    The name in topics, logs and broker users stays: the device and its keys do not change.
    """
    fleet = open_fleet(directory)
    device = fleet.named(device)
    own = name == device
    said = f"{device} is shown under its own name" if own else f"{device} is shown as {name}"
    _label(fleet, [device], {SHOWN: "" if own else name}, said, json=json)


def label(
    directory: Directory,
    devices_: Annotated[list[str], typer.Argument(metavar="DEVICE...", help="The devices' names.")],
    labels: Annotated[
        list[str], typer.Option("--label", help="Label KEY=VALUE, such as site=berlin; KEY= removes it; repeatable.")
    ],
    json: AsJson = False,
) -> None:
    """Give devices labels, which status, page and metrics show and by which `run start --only` chooses."""
    changes = {key: value for key, _, value in (text.partition("=") for text in labels)}
    if SHOWN in changes or not all("=" in text for text in labels):
        raise UsageError(
            "a label is KEY=VALUE, and no key is `name`",
            hint="KEY= removes one; shoal-fleet rename sets the shown name",
        )
    fleet = open_fleet(directory)
    _label(fleet, [fleet.named(each) for each in devices_], changes, json=json)


def _label(fleet: FleetDirectory, names: list[str], changes: dict[str, str], said: str = "", *, json: bool) -> None:
    fleet.label(names, changes)
    found = {name: fleet.roster.labels_of(name) for name in names}
    offline = settings_of(fleet.path).offline
    say_result(
        {"roster": fleet.roster.sequence, "labels": found, "published": not offline},
        *([said] if said else (f"{name} {text}".rstrip() for name, text in found.items())),
        as_json=json,
    )
    _publish_signed(fleet)


def replace_aggregator(
    directory: Directory,
    card: Annotated[
        Path, typer.Argument(help="The card of the new aggregator, from init.", exists=True, dir_okay=False)
    ],
    fingerprint: Annotated[str, typer.Option(help="Refuse the card unless it has this fingerprint.")] = "",
    json: AsJson = False,
) -> None:
    """Put a new aggregator in the place of one whose machine or directory is lost; prints the grant to carry to it.

    Signs a roster that names the new one, and draws new secrets. Devices go over to it by themselves, also those that come back
    weeks later, and nobody takes the old one's messages any more. The run in progress ends: each device keeps its newest model.
    Again with the same card it publishes again.
    """
    fleet, offline = open_fleet(directory), settings_of(directory).offline
    grant = fleet.replace_aggregator(card.read_bytes(), fingerprint)
    if (order := schedules.signed_again(fleet)) is not None:
        fleet.replace_aggregator(card.read_bytes(), fingerprint, order)
    made = {"name": grant.stem, "grant": str(grant), "owner": fleet.fingerprint, "roster": fleet.roster.sequence}
    if not json:
        say(str(grant))
    again = f"replace-aggregator {directory} {card}"
    _publish_signed(fleet, f"{again} again, which publishes it", again=again, replaced=fleet.users.last_replaced)
    if json:
        say_json({**made, "published": not offline})
    broker_users(fleet, "accepts the new aggregator and shuts the old one out", published=True)
    note(f"next: shoal-aggregator join DIR GRANT --owner {fleet.fingerprint}, then shoal-aggregator serve DIR")
    if order is None:
        note("then start a run: the one in progress has ended, and its devices keep their newest models")
    else:
        note("the standing order is in the grant: its next run begins with the devices' newest models")


def rotate(
    directory: Directory,
    json: AsJson = False,
) -> None:
    """Draw new secrets without removing a device; the current run uses them from its next round on.

    A run that was signed before and starts later begins under them; sign it again only if a later run has already started.
    """
    fleet, offline = open_fleet(directory), settings_of(directory).offline
    fleet.rotate()
    if not json:
        say(f"new secrets since roster {fleet.roster.sequence}")
    _publish_signed(fleet)
    if json:
        say_json({"roster": fleet.roster.sequence, "published": not offline})


def publish(
    directory: Directory,
    json: AsJson = False,
) -> None:
    """Publish the newest roster and each party's newest keys: after changes that were only signed, or if the broker lost them."""
    fleet = open_fleet(directory)
    with _connected(fleet) as connection:
        connection.publish()
    schedules.send_again(fleet)
    say_result(
        {"roster": fleet.roster.sequence, "keys": len(fleet.cards())},
        f"roster {fleet.roster.sequence}, keys for {len(fleet.cards())}",
        as_json=json,
    )


def broker_config(
    directory: Directory,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write to.", file_okay=False)],
    device: Annotated[
        list[str] | None, typer.Option(help="Device that is not enrolled yet and gets a user now; repeatable.")
    ] = None,
    dynamic: Annotated[
        bool | None,
        typer.Option(
            "--dynamic/--static",
            help="Let mosquitto's dynamic security plugin have the users: approve, revoke and publish then change them while the "
            "broker runs.",
            show_default="as before, at first --static",
        ),
    ] = None,
    home_assistant: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Home Assistant's discovery prefix (homeassistant): a user for it, and access for the aggregator's sensors; '' "
            "for none.",
            show_default="as before, at first none",
        ),
    ] = None,
    websockets: Annotated[
        bool,
        typer.Option(
            "--websockets",
            help="Write nginx.conf too: nginx has TLS at the port of the fleet's wss:// address, and passes websockets on to "
            "mosquitto. It stays until nginx.conf is removed.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Write mosquitto's configuration, passwords, access list and certificates for this fleet.

    Every device, the aggregator, the owner and enrolment requests get a user; each reaches only its own topics. From then on
    grants and tokens contain user and password. With --dynamic it is run once; without, again after each approve and revoke, and
    then reload mosquitto (SIGHUP).
    """
    from shoal.owner.broker.config import CLIENTS, write_broker_config

    fleet, config = open_fleet(directory), settings_of(directory)
    made = write_broker_config(
        fleet,
        out,
        installed=config.broker_folder,
        expected=tuple(device or ()),
        upload_bytes=config.upload_bytes,
        dynamic=dynamic,
        plugin=config.plugin,
        home_assistant=home_assistant,
        websockets=websockets,
    )
    file = str(made.folder / "shoal.conf")
    say_result({"config": file, "users": list(made.users), "tls": made.tls}, file, as_json=json)
    note(f"users: {', '.join(made.users)}")
    note(
        f"next: copy all but the folder of clients to the broker's host, into {(config.broker_folder or out).absolute()}, which "
        "must belong to the broker's user (for another folder: the setting broker_folder)"
    )
    note(f"addresses with passwords for parties that joined before are in {made.folder / CLIENTS}")
    if not made.tls:
        note("warning: the fleet's broker address begins with mqtt://: passwords are sent unencrypted")


def _connected(fleet: FleetDirectory) -> OwnerConnection:
    from shoal.owner.enrolment.connection import OwnerConnection  # loads the MQTT client, which help does not need

    return OwnerConnection(fleet, note)


def _publish_signed(fleet: FleetDirectory, later: str = "", *, again: str = "", replaced: str = "") -> None:
    """Publish what was signed just now, or with the setting ``offline`` name the command that does so.

    Args:
        fleet: the owner's directory.
        later: that command, with what else the owner may do; by default `publish`.
        again: the command that goes on after an error; by default `publish`.
        replaced: as in `OwnerConnection.publish`.
    """
    if settings_of(fleet.path).offline:
        note(f"next: shoal-fleet {later or f'publish {fleet.path}'}")
        return
    try:
        with _connected(fleet) as connection:
            connection.publish(replaced)
        if not replaced:
            schedules.send_again(fleet)
    except ShoalError as error:
        add_hint(
            error, f"it is signed and stored: shoal-fleet {again or f'publish {fleet.path}'} when the broker is back"
        )
        raise


def drawn_for(fleet: FleetDirectory, new: int) -> str:
    """Return the first half of a line about new keys: for whom an admission of ``new`` devices drew them."""
    others = counted(fleet.roster.active_count - new, "other device")
    return f"new keys since roster {fleet.roster.keys_since} for {others} and the aggregator"


def _listing(fleet: FleetDirectory, registrar: Registrar) -> dict[str, Any]:
    now_s = int(time.time())
    roster = fleet.roster
    return {
        "fleet": fleet.name,
        "roster": roster.sequence,
        "pending": [
            {
                "name": r.name,
                "fingerprint": r.fingerprint,
                "token": r.token,
                "age_s": max(0, now_s - r.asked_at_s),
                "hint": _replacing(fleet, r.name),
            }
            for r in sorted(registrar.pending.values(), key=lambda r: r.name)
        ],
        "refused": [_refused(r) for r in sorted(registrar.refused.values(), key=lambda r: r.token)],
        "devices": listed_devices(roster),
    }


def listed_devices(roster: Roster) -> list[dict[str, Any]]:
    """Return the devices of a roster, revoked ones as well, for a program to read."""
    from crypto.seal.identity import fingerprint

    return [
        {
            "name": d.name,
            "fingerprint": fingerprint(d),
            "revoked": d.name in roster.revoked,
            "labels": read_labels(roster.labels_of(d.name)),
        }
        for d in roster.devices
    ]


def _refused(request: Refused) -> dict[str, str]:
    return {"name": request.name, "token": request.token, "reason": request.reason, "hint": request.hint}


def _asked(request: dict[str, Any]) -> tuple[str, str]:
    return request["token"], request["fingerprint"]


def _replacing(fleet: FleetDirectory, name: str) -> str:
    """Return how a device that asks under the name of one of the fleet comes in; empty for a new name."""
    known = any(device.name == name for device in fleet.roster.devices)
    return (
        f"the fleet has a {name}: shoal-fleet replace {fleet.path} {name} puts this one in its place" if known else ""
    )


def _pending(request: dict[str, Any]) -> str:
    asked = f"pending {request['name']} {request['fingerprint']} line {request['token']} asked {request['age_s']} s ago"
    return f"{asked}; {request['hint']}" if request["hint"] else asked


def _lines(data: dict[str, Any]) -> list[str]:
    lines = [_pending(r) for r in data["pending"]]
    lines += [f"refused {r['name']} line {r['token']}: {r['reason']}" for r in data["refused"]]
    return lines + [
        f"{'revoked' if d['revoked'] else 'enrolled'} {d['name']} {d['fingerprint']} {write_labels(d['labels'])}".rstrip()
        for d in data["devices"]
    ]


COMMANDS = (
    *(invite, devices, approve, reject, revoke, replace, rename, label, rotate, publish),
    *(replace_aggregator, broker_config),
)
