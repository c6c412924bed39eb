"""The health checks that the three parties share: directory, disk, roster and clock, broker, TLS."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal.address import BrokerAddress, BrokerSettings
from shoal.errors import ConfigError
from shoal.limits import LOW_DISK_BYTES
from shoal.membership.directory import ROSTER_FILE, Membership
from shoal.membership.roster import EXPIRED_HINT, expiry_of, has_expired
from shoal.protocol.topics import TopicKind, Topics
from shoal.util.console import Check, checked, ok, second, span
from shoal.util.files import check_directory, check_own, free_bytes, read_failed
from shoal.util.own_packages import ADVICE, rivals

if TYPE_CHECKING:
    from shoal.protocol.documents import Roster

DISK_LOW_BYTES: Final = 100 << 20
EXPIRES_SOON_S: Final = 14 * 86400
CLOCK_SLACK_S: Final = 300
LOOKED_AT: Final = 3
"""Devices whose presence the aggregator's `doctor` looks for at the broker."""
KEEPS_HINT: Final = "docs/operator/broker.md says what Shoal needs of a broker, and which brokers have it"
PUBLIC: Final = (".card", ROSTER_FILE, "model.onnx", "model.json")
"""Endings of files in a party's directory that others may read: people copy them, or programs use a device's model in use."""


def local_checks(directory: Path) -> list[Check]:
    """Return the checks of a party's directory and its disk, and a warning for each package that is not ours alone."""
    return [
        checked("directory", lambda: _directory(directory)),
        checked("disk", lambda: _disk(directory)),
        *(
            Check("packages", "warning", f"{other} has files in Shoal's package {name}", ADVICE.format(other))
            for name, other in rivals().items()
        ),
    ]


def membership_checks(member: Membership[Any], name: str, settings: BrokerSettings) -> list[Check]:
    """Return the checks of roster and clock, and of the broker.

    Args:
        member: of a device or an aggregator.
        name: the party's name.
        settings: how the party reaches the broker.
    """
    roster = roster_check(member.roster)
    try:
        address = BrokerAddress.of(settings, member.grant)
    except ConfigError as error:
        return [roster, Check("broker", "failure", str(error), error.hint)]
    topics = Topics(member.fleet)
    # A party may write nothing that it may read: it looks at what others have retained there.
    seen = [topics.state(device) for device in member.roster.active()[:LOOKED_AT]]
    places = [(topics.filter(TopicKind.STATE), topic) for topic in seen]
    if name != "aggregator":
        places = [(f"{base}/#", base) for base in (topics.roster_change, topics.round)]
    return [roster, *broker_checks(address, f"shoal-{member.fleet}-{name}-doctor", places)]


def roster_check(roster: Roster) -> Check:
    """Return the check of a roster's dates against this machine's clock."""
    return checked("roster", lambda: _roster(roster, int(time.time())))


def broker_checks(
    address: BrokerAddress, client_id: str, places: Sequence[tuple[str, str]], own: tuple[str, str] | None = None
) -> list[Check]:
    """Return the checks of the connection to the broker, of its certificates, and of what it keeps; see `probe.survey`."""
    return [
        checked("broker", lambda: _broker(address, client_id, places, own)),
        checked("tls", lambda: _tls(address, int(time.time()))),
    ]


def _directory(directory: Path) -> Check:
    check_directory(directory)
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if not entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise read_failed(directory, error) from error
    files = [directory / name for name in names if not name.endswith(PUBLIC)]
    for path in files:
        with suppress(FileNotFoundError):  # a running program has replaced it meanwhile
            check_own(path)
    return ok("directory", f"{directory} and its {len(files)} private files can be read by this user alone")


def _disk(directory: Path) -> Check:
    try:
        free = free_bytes(directory)
    except OSError as error:
        raise read_failed(directory, error) from error
    detail = f"{free / (1 << 20):.0f} MiB free"
    if free < DISK_LOW_BYTES:
        return Check("disk", "failure" if free < LOW_DISK_BYTES else "warning", detail, "free some space")
    return ok("disk", detail)


def _roster(roster: Roster, now_s: int) -> Check:
    detail = f"sequence {roster.sequence}, valid until {expiry_of(roster)}"
    if now_s < roster.issued_at_s - CLOCK_SLACK_S:
        behind = (
            f"this machine's clock is at least {span(roster.issued_at_s - now_s)} behind the owner's: {second(now_s)}"
        )
        return Check("roster", "failure", behind, "set the clock (timedatectl set-ntp true)")
    if has_expired(roster, now_s):
        return Check("roster", "failure", f"expired: {detail}; this machine's clock says {second(now_s)}", EXPIRED_HINT)
    if roster.expires_at_s - now_s < EXPIRES_SOON_S:
        return Check("roster", "warning", detail, "the owner runs `shoal-fleet renew` and `shoal-fleet publish`")
    return ok("roster", detail)


def _broker(
    address: BrokerAddress, client_id: str, places: Sequence[tuple[str, str]], own: tuple[str, str] | None
) -> Check:
    from shoal.transport.probe import log_in, survey

    reached = f"{address} accepts the connection, MQTT {log_in(address, client_id)}"
    found = survey(address, client_id, places, own)
    told = {
        "sessions": found.session,
        "retained messages": found.retained,
        "retained messages for wildcards": found.wildcards,
        "messages of a chunk's size": found.large,
        "order": found.ordered,
    }
    words = {True: "yes", False: "no", None: "not seen"}
    detail = f"{reached}; {', '.join(f'{thing}: {words[it]}' for thing, it in told.items())}"
    if False not in told.values():
        return ok("broker", detail)
    return Check("broker", "failure" if False in (found.large, found.retained) else "warning", detail, KEEPS_HINT)


def _tls(address: BrokerAddress, now_s: int) -> Check:
    from shoal.transport.probe import certificate_expiry, own_expiries

    if not address.tls:
        if address.is_loopback:
            return ok("tls", "none: the broker is on this machine")
        return Check("tls", "warning", "none: user and password travel in clear", "use mqtts:// and the setting `ca`")
    named = {"ca": "its CA", "client": "this client's certificate"}
    found = {"the broker's certificate": certificate_expiry(address)}
    found |= {named[name]: at_s for name, at_s in own_expiries(address).items()}
    detail = ", ".join(f"{thing} is valid until {second(at_s)}" for thing, at_s in found.items())
    if min(found.values()) < now_s:
        return Check("tls", "failure", detail, "issue a new certificate")
    if min(found.values()) - now_s < EXPIRES_SOON_S:
        return Check("tls", "warning", detail, "issue a new certificate soon")
    return ok("tls", detail)
