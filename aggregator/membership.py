"""The aggregator's place in a fleet. Its grant has no field for a mask secret."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from crypto.seal.grants import AGGREGATOR_ROLE
from crypto.seal.identity import fingerprint
from crypto.seal.membership import Membership, accept_grant, make_identity
from support.files import private_directory
from wire.documents import AggregatorGrant, RunPlan
from wire.errors import UntrustedError

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

    def obstacle(self, plan: RunPlan) -> str:
        """Return what is missing to serve a run, empty where nothing is; keys that the run is made with come in force.

        Raises:
            UntrustedError: the run can never be served: its keys have been replaced.
        """
        if self.roster.sequence < plan.roster_sequence:
            return f"run {plan.run} was signed under roster {plan.roster_sequence}, this is {self.roster.sequence}"
        if self.next is not None and self.generation(self.next) <= plan.roster_sequence:
            self.promote()
        held = self.generation(self.grant)
        if held > plan.roster_sequence:
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
