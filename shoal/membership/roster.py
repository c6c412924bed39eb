"""Checks of a received roster: signed by the owner, of the right fleet, not expired, not older than one seen before.

`roster_change` makes the difference of two rosters, so that a change in a fleet of n does not send n rosters of size n. The
owner signs whole rosters only. A change lists the new entries and carries that signature; a device that applies it checks the
signature over the resulting roster. So the aggregator, which makes the changes, can't add anything that the owner has not
signed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

from crypto.seal.identity import open_document
from shoal.digests import sha256
from shoal.errors import UntrustedError, WireError
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member, Roster, RosterChange
from shoal.util.console import second

MOST_DIGITS: Final = 10
"""Most decimal digits of a sequence, which is 32 bits wide on the wire."""
FORK_HINT: Final = (
    "the owner's directory was restored from a backup, or two copies of it are in use: end the other copy, then let the right "
    "one run `shoal-fleet publish`, which signs a roster beyond both; compare its devices with `shoal-fleet show`"
)


class RosterForkError(UntrustedError):
    """The owner has signed two different rosters of one sequence."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"two different rosters of sequence {sequence}, both signed by the owner", hint=FORK_HINT)


EXPIRED_HINT: Final = (
    "is this machine's clock right? if so, the owner runs `shoal-fleet renew` and `shoal-fleet publish`"
)


def open_roster(data: bytes | memoryview, *, owner_key: bytes, fleet: str, least_sequence: int, now_s: int) -> Roster:
    """Return the owner's roster of ``fleet``.

    Args:
        data: signature and document.
        owner_key: the pinned owner's Ed25519 key, 32 bytes.
        fleet: the expected fleet.
        least_sequence: highest sequence seen so far.
        now_s: unix seconds; 0 accepts an expired roster.

    Raises:
        UntrustedError: the roster is not signed by the owner, of another fleet, rolled back, or expired.
    """
    roster = open_document(data, Roster, owner_key)
    if roster.fleet != fleet:
        raise UntrustedError(f"a roster of fleet {roster.fleet!r}, not {fleet!r}")
    if roster.sequence < least_sequence:
        raise UntrustedError(
            f"a roster of sequence {roster.sequence} after {least_sequence}: refused as a rollback",
            hint="the owner's newest is roster.signed in the fleet's directory",
        )
    if has_expired(roster, now_s):
        raise UntrustedError(
            f"the roster has expired: it was valid until {expiry_of(roster)}",
            hint="is this machine's clock right? if so, have the owner sign a new one, `shoal-fleet renew`, and hand it out",
        )
    return roster


def digest_of(signed: bytes | memoryview) -> bytes:
    """Return the SHA-256 of a signed roster, 32 bytes. Two rosters of one sequence with different digests are a fork."""
    return sha256(signed)


def has_expired(roster: Roster, now_s: int) -> bool:
    """Return whether a roster has expired at ``now_s``, unix seconds."""
    return now_s > roster.expires_at_s


def expiry_of(roster: Roster) -> str:
    """Return a roster's expiry as text, in UTC."""
    return second(roster.expires_at_s)


def aggregator_of(roster: Roster) -> Member:
    """Return the aggregator's public identity.

    Raises:
        UntrustedError: the owner has not added one yet.
    """
    if roster.aggregator is None:
        raise UntrustedError("the fleet has no aggregator yet", hint="shoal-fleet add-aggregator DIR CARD")
    return roster.aggregator


def entries_of(roster: Roster) -> list[tuple[Member, str]]:
    """Return a roster's devices, each with the text of its labels."""
    return list(zip(roster.devices, itertools.chain(roster.labels, itertools.repeat("")), strict=False))


def shortened(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the texts of devices' labels as a roster has them: without the empty ones at the end."""
    texts = list(labels)
    while texts and not texts[-1]:
        texts.pop()
    return tuple(texts)


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
    sizes = {len(change.places), len(change.members), len(change.labels)}
    if len(sizes) > 1 or change.revoked_stay > len(before.revoked):
        raise WireError("a change of a roster that does not fit together")
    entries: list[tuple[Member, str] | None] = [*entries_of(before)[: change.devices]]
    entries += [None] * (change.devices - len(entries))
    for place, member, text in zip(change.places, change.members, change.labels, strict=True):
        if place >= change.devices:
            raise WireError(f"a change of place {place} in a roster of {change.devices}")
        entries[place] = member, text
    whole = [entry for entry in entries if entry is not None]
    if len(whole) != change.devices:
        raise WireError("a change of a roster that leaves places empty")
    roster = Roster(
        fleet=change.fleet,
        sequence=change.sequence,
        issued_at_s=change.issued_at_s,
        expires_at_s=change.expires_at_s,
        aggregator=change.aggregator,
        devices=tuple(member for member, _ in whole),
        revoked=(*before.revoked[: change.revoked_stay], *change.revoked),
        keys_since=change.keys_since,
        labels=shortened(text for _, text in whole),
        later=change.later,
    )
    return change.signature + encode(roster)
