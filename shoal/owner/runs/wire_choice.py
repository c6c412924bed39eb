"""The wire version of a run: the newest that the owner, the aggregator and all rostered devices speak.

The aggregator's status has the versions that it and each device speak. A device that has never connected is left aside, since
nothing is known of it. Example: the owner and the aggregator speak 1 to 2 and one old device 1, so the run is in wire version 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from aggregator.rounds.standstill import named
from aggregator.status.record import REVOKED
from shoal.errors import ConfigError, UsageError, WireError
from shoal.protocol.wire_versions import WireRange, newest_common

if TYPE_CHECKING:
    from aggregator.status.record import FleetStatus

LEAVE_OUT: Final = (
    "upgrade Shoal there first; or start the run with --wire {wire}, which leaves them out until they are upgraded"
)


def check_spoken(wire: int, owner: WireRange) -> None:
    """Check that the owner's program speaks a wire version that was chosen by hand.

    Raises:
        UsageError: it does not.
    """
    if wire not in owner:
        raise UsageError(f"--wire {wire}: this program speaks wire version {owner}")


def choose_wire(status: FleetStatus, owner: WireRange) -> int:
    """Return the newest wire version that all parties speak.

    Args:
        status: the aggregator's record of the fleet.
        owner: the versions that the owner's program speaks.

    Raises:
        ConfigError: there is none; the message names who must be upgraded first.
    """
    with_aggregator = [owner, *([_range(status.wire)] if status.wire is not None else [])]
    best = newest_common(with_aggregator)
    if best is None:
        raise ConfigError(
            f"this program speaks wire version {owner}, the aggregator (shoal {status.version}) {with_aggregator[1]}",
            hint=f"upgrade {'the aggregator' if with_aggregator[1].most < owner.least else 'this program'} first",
        )
    spoken = {d.name: _range(d.wire) for d in status.devices if d.wire is not None and d.reason != REVOKED}
    found = newest_common([*with_aggregator, *spoken.values()])
    if found is None:
        versions = {d.name: d.version for d in status.devices}
        raise ConfigError(
            f"not all devices speak a wire version of the owner and the aggregator: {_words(spoken, versions, best)}",
            hint=LEAVE_OUT.format(wire=best),
        )
    return found


def held_back(status: FleetStatus, owner: WireRange, wire: int) -> str:
    """Return who keeps a run from a newer wire version than ``wire``, the choice of `choose_wire`; empty if none does.

    A device or an aggregator could claim an older range than its own: the owner sees the price.
    """
    aggregator = None if status.wire is None else _range(status.wire)
    newest = owner.most if aggregator is None else min(owner.most, aggregator.most)
    if aggregator is not None and aggregator.most == wire < owner.most:
        return f"the aggregator (shoal {status.version}) speaks no newer"
    names = [
        f"{d.name} (shoal {d.version})" for d in status.devices if d.wire is not None and d.wire[1] == wire < newest
    ]
    return f"{named(names)} speak no newer" if names else ""


def _words(spoken: Mapping[str, WireRange], versions: Mapping[str, str], wire: int) -> str:
    """Return the devices that do not speak ``wire``, with their software."""
    left_out = [
        f"{name} (shoal {versions[name]}, wire {range_})" for name, range_ in spoken.items() if wire not in range_
    ]
    return named(left_out)


def _range(pair: tuple[int, int]) -> WireRange:
    try:
        return WireRange(*pair)
    except WireError as error:
        raise ConfigError(f"the aggregator's status has {error}") from error
