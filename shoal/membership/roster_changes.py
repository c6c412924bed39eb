"""Rosters on their way: sealed by the owner to the aggregator, which sends devices the change from the roster before."""

from __future__ import annotations

from typing import Final

from crypto.seal.identity import SIGNATURE_BYTES
from shoal.errors import UntrustedError
from shoal.membership.roster import MOST_DIGITS, digest_of, entries_of
from shoal.protocol.channels import OWNER_ROSTER
from shoal.protocol.documents import Roster, RosterChange


class ReplacedError(UntrustedError):
    """The owner has put another aggregator in the place of this one, whose keys are of no use any more."""

    def __init__(self, sequence: int, print_: str) -> None:
        super().__init__(
            f"roster {sequence} does not name this aggregator ({print_}): the owner has put another one in its place",
            hint=REPLACED_HINT,
        )


REPLACED_HINT: Final = (
    "keep this program off. To make this machine the aggregator again: shoal-aggregator init in a new directory, and "
    "shoal-fleet replace-aggregator FLEET_DIR CARD on the owner's machine"
)


def owner_purpose(sequence: int, signed: bytes) -> str:
    """Return the purpose of the envelope in which the owner seals a roster to the aggregator.

    The owner can't open that envelope again. After a restore it reads from the purpose, which its signature covers, which
    roster the fleet has. The broker learns only the sequence, since the digest covers a signature.
    """
    return OWNER_ROSTER.purpose.format(sequence=sequence, digest=digest_of(signed).hex())


def read_owner_purpose(purpose: str) -> tuple[int, bytes] | None:
    """Return sequence and digest from `owner_purpose`; None for another purpose."""
    name, _, rest = purpose.partition("/")
    sequence, _, digest = rest.partition("/")
    if name != OWNER_ROSTER.stem or not (sequence.isascii() and sequence.isdigit() and len(sequence) <= MOST_DIGITS):
        return None
    try:
        return int(sequence), bytes.fromhex(digest)
    except ValueError:
        return None


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
    old, new = entries_of(known), entries_of(roster)
    places = [place for place, entry in enumerate(new) if place >= len(old) or old[place] != entry]
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
        labels=tuple(new[place][1] for place in places),
        revoked_stay=stay,
        revoked=roster.revoked[stay:],
        keys_since=roster.keys_since,
        later=roster.later,
    )
