"""A new roster as the difference to the one before, so that a change in a fleet of n does not send n rosters of n.

The owner signs whole rosters and nothing else. A change names what is new and carries that signature, so whoever applies it
checks the whole roster that results: the aggregator, which makes changes, can't say anything that the owner has not signed.
"""

from __future__ import annotations

from crypto.seal.identity import SIGNATURE_BYTES
from shoal.errors import WireError
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member, Roster, RosterChange


def roster_change(before: Roster | None, roster: Roster, signed: bytes) -> RosterChange:
    """Return what turns ``before`` into ``roster``.

    Args:
        before: the roster that the fleet was told last; None where nobody knows, the change then only says which is newest.
            The same goes for one that can't come before.
        roster: the newest.
        signed: the same as the owner signed it.
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
        known.sequence,
        signed[:SIGNATURE_BYTES],
        roster.fleet,
        roster.sequence,
        roster.issued_at_s,
        roster.expires_at_s,
        roster.aggregator,
        len(roster.devices),
        tuple(places),
        tuple(roster.devices[place] for place in places),
        stay,
        roster.revoked[stay:],
        roster.keys_since,
    )


def apply_change(before: Roster, change: RosterChange) -> bytes:
    """Return the newest roster as the owner signed it, signature not checked; nothing else than `open_roster` may read it.

    Args:
        before: the roster that the change follows, of its fleet and sequence.
        change: from `roster_change`.

    Raises:
        WireError: it is of another roster, or names places that it does not fill.
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
        change.fleet,
        change.sequence,
        change.issued_at_s,
        change.expires_at_s,
        change.aggregator,
        whole,
        (*before.revoked[: change.revoked_stay], *change.revoked),
        change.keys_since,
    )
    return change.signature + encode(roster)
