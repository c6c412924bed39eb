"""A new roster as a difference to the previous one, so that a change in a fleet of n does not send n rosters of size n.

The owner signs whole rosters only. A change lists the new entries and carries that signature; a device that applies it
checks the signature over the resulting roster. So the aggregator, which makes the changes, can't add anything that the owner
has not signed.
"""

from __future__ import annotations

from crypto.seal.identity import SIGNATURE_BYTES
from shoal.errors import WireError
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member, Roster, RosterChange


def roster_change(before: Roster | None, roster: Roster, signed: bytes) -> RosterChange:
    """Return the change from ``before`` to ``roster``.

    Args:
        before: the roster that was published last. If it is None, of another fleet or newer than ``roster``, the change is
            empty and only names the newest roster.
        roster: the newest roster.
        signed: the same roster as the owner signed it.
    """
    known = roster
    if before is not None and before.fleet == roster.fleet and before.sequence <= roster.sequence:
        known = before
    places = [
        place
        for place, member in enumerate(roster.devices)
        if place >= len(known.devices) or known.devices[place] != member
    ]
    stay = 0
    while stay < min(len(known.revoked), len(roster.revoked)) and known.revoked[stay] == roster.revoked[stay]:
        stay += 1
    return RosterChange(
        after=known.sequence,
        signature=signed[:SIGNATURE_BYTES],
        fleet=roster.fleet,
        sequence=roster.sequence,
        issued_at_s=roster.issued_at_s,
        expires_at_s=roster.expires_at_s,
        aggregator=roster.aggregator,
        devices=len(roster.devices),
        places=tuple(places),
        members=tuple(roster.devices[place] for place in places),
        revoked_stay=stay,
        revoked=roster.revoked[stay:],
        keys_since=roster.keys_since,
        later=roster.later,
    )


def apply_change(before: Roster, change: RosterChange) -> bytes:
    """Apply a change and return the resulting signed roster. Its signature is NOT checked: open it with `open_roster`.

    Args:
        before: the roster that the change starts from.
        change: from `roster_change`.

    Raises:
        WireError: the change starts from another roster, or does not fill all places.
    """
    if (change.fleet, change.after) != (before.fleet, before.sequence):
        raise WireError(f"a change of roster {change.after} of {change.fleet!r} on {before.sequence}")
    if len(change.places) != len(change.members) or change.revoked_stay > len(before.revoked):
        raise WireError("a change of a roster that does not fit together")
    devices: list[Member | None] = [*before.devices[: change.devices]]
    devices += [None] * (change.devices - len(devices))
    for place, member in zip(change.places, change.members, strict=True):
        if place >= change.devices:
            raise WireError(f"a change of place {place} in a roster of {change.devices}")
        devices[place] = member
    whole = tuple(member for member in devices if member is not None)
    if len(whole) != change.devices:
        raise WireError("a change of a roster that leaves places empty")
    roster = Roster(
        fleet=change.fleet,
        sequence=change.sequence,
        issued_at_s=change.issued_at_s,
        expires_at_s=change.expires_at_s,
        aggregator=change.aggregator,
        devices=whole,
        revoked=(*before.revoked[: change.revoked_stay], *change.revoked),
        keys_since=change.keys_since,
        later=change.later,
    )
    return change.signature + encode(roster)
