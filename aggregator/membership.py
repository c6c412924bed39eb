"""The aggregator's place in a fleet. Its grant has no field for a mask secret."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from crypto.seal.envelope import is_from, read_head
from crypto.seal.identity import fingerprint
from shoal.errors import UntrustedError
from shoal.membership.directory import Membership, accept_grant, make_identity
from shoal.membership.grants import AGGREGATOR_ROLE
from shoal.protocol import channels
from shoal.protocol.documents import AggregatorGrant, Member, RunPlan
from shoal.util.files import private_directory

UNKNOWN_HINT: Final = "if the owner has added it: shoal-fleet publish; if the owner has revoked it, switch it off"
RUNS_DIRECTORY: Final = "runs"


class AggregatorMembership(Membership[AggregatorGrant]):
    """An aggregator that belongs to a fleet."""

    def __init__(self, directory: Path) -> None:
        """Load what `join` left in ``directory``.

        Raises:
            NotEnrolledError: nobody has joined there.
            UntrustedError: the roster is not the owner's, expired, or names another aggregator.
        """
        super().__init__(directory, AggregatorGrant)
        if self.roster.aggregator != self.identity.member:
            raise UntrustedError(
                f"the roster does not name this aggregator ({fingerprint(self.identity.member)})",
                hint="shoal-fleet add-aggregator FLEET_DIR CARD, then join with the new grant",
            )

    def turn_to(self, generation: int) -> None:
        """Speak under the broadcast key of the grant with the secrets of ``generation``, if it is newer than the one in force."""
        grant = self.newer(generation)
        if grant is not None:
            self.group = self._broadcast(grant)

    def open_from_device(self, member: Member, payload: memoryview, signed: bytes) -> memoryview:
        """Return the plaintext of what a device told the fleet, under the broadcast key in force or the next.

        Args:
            member: the device.
            payload: a group envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            SealError: under no key that we hold, altered, or not the device's.
        """
        head, at = read_head(payload)
        return self.open_under_any(payload, head, at, member.sign_key, signed)[1]

    def is_presence_of(self, member: Member, payload: memoryview, signed: bytes) -> bool:
        """Whether a device has said where it stands, also where we can't read it; arguments as `open_from_device`."""
        head, _ = read_head(payload)
        told = (head.fleet, head.purpose, head.sender) == (self.fleet, channels.PRESENCE.purpose, member.name)
        return told and is_from(payload, head, member.sign_key, signed)

    def reason(self, plan: RunPlan, turned_to: int | None = None) -> str:
        """Return what is missing to serve a run, empty where nothing is; keys that the run is made with come in force.

        Args:
            plan: the run's.
            turned_to: newest secrets that the run has rolled over to, or has begun to, by the roster sequence at which
                they were drawn; None where it is under those that it was signed with.

        Raises:
            UntrustedError: the run can never be served: its keys have been replaced before it began.
        """
        if self.roster.sequence < plan.roster_sequence:
            return f"run {plan.run} was signed under roster {plan.roster_sequence}, this is {self.roster.sequence}"
        newest = max(plan.roster_sequence, turned_to or 0)
        grant = self.newer(plan.roster_sequence)
        if grant is not None:
            self.promote(grant)
        held = self.grant.keys_since
        if held > newest:
            raise UntrustedError(
                f"run {plan.run} was made with keys that have been replaced since",
                hint="have the owner sign it anew: shoal-fleet run",
            )
        if held < self.roster.keys_since <= plan.roster_sequence:
            return f"run {plan.run} was made with newer keys than we have"
        return ""


def init(directory: Path, name: str = "aggregator") -> Path:
    """Make the aggregator's keys and its directory for runs; return the card for the owner."""
    card = make_identity(directory, name, AGGREGATOR_ROLE)
    private_directory(directory / RUNS_DIRECTORY)
    return card


def join(directory: Path, grant_file: bytes, owner_fingerprint: str) -> AggregatorMembership:
    """Accept the owner's grant and return the membership."""
    accept_grant(directory, grant_file, AggregatorGrant, owner_fingerprint)
    return AggregatorMembership(directory)
