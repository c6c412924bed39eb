"""The aggregator's membership in a fleet: its keys, its grant and the roster. Its grant has no field for a mask secret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from crypto.seal.envelope import (
    is_from,
    read_head,
)
from crypto.seal.identity import fingerprint
from shoal.errors import ShoalError, UntrustedError
from shoal.membership.directory import Membership, accept_grant, make_identity
from shoal.membership.grants import AGGREGATOR_ROLE
from shoal.membership.roster_changes import ReplacedError
from shoal.protocol import channels
from shoal.protocol.documents import AggregatorGrant, Member, Roster, RunPlan
from shoal.util.files import private_directory

UNKNOWN_HINT: Final = "if the owner has added it: shoal-fleet publish; if the owner has revoked it, switch it off"
RUNS_DIRECTORY: Final = "runs"
TOLD_FILE: Final = "roster.told"


class FalseMessageError(UntrustedError):
    """A device of the roster has signed a message that is malformed, or that contradicts the fleet or its own envelope.

    Attributes:
        device: the signer, which `status` names.
    """

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(reason)
        self.device = device


@contextmanager
def signed_by(device: str) -> Iterator[None]:
    """Turn errors about the content of a message whose signature by ``device`` is verified into `FalseMessageError`."""
    try:
        yield
    except ShoalError as error:
        raise FalseMessageError(device, str(error)) from error


class AggregatorMembership(Membership[AggregatorGrant]):
    """The membership of an aggregator, with the broadcast key in use as ``group``."""

    def __init__(self, directory: Path) -> None:
        """Load what `join` left in ``directory``.

        Raises:
            NotEnrolledError: the directory holds no membership.
            UntrustedError: the roster is not the owner's, or expired.
            ReplacedError: it names another aggregator.
        """
        super().__init__(directory, AggregatorGrant)

    def _open(self, data: bytes, least_sequence: int, *, expired: bool = False) -> Roster:
        """Open a roster as every party does, and check that it names this aggregator.

        Raises:
            ReplacedError: it names another.
        """
        roster = super()._open(data, least_sequence, expired=expired)
        if roster.aggregator != self.identity.member:
            raise ReplacedError(roster.sequence, fingerprint(self.identity.member))
        return roster

    def open_from_device(self, member: Member, payload: memoryview, signed: bytes) -> memoryview:
        """Open a device's group envelope with any stored broadcast key; return the plaintext.

        Args:
            member: the device.
            payload: the envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            SealError: sealed under an unknown key, altered, or not signed by the device.
        """
        head, at = read_head(payload)
        return self.open_under_any(payload, head, at, member.sign_key, signed)[1]

    def is_presence_of(self, member: Member, payload: memoryview, signed: bytes) -> bool:
        """Return whether an envelope is a presence signed by the device, without opening it; arguments as `open_from_device`."""
        head, _ = read_head(payload)
        told = (head.fleet, head.purpose, head.sender) == (self.fleet, channels.PRESENCE.purpose, member.name)
        return told and is_from(payload, head, member.sign_key, signed)

    def reason(self, plan: RunPlan, key_version: int | None = None) -> str:
        """Return why a run can't be served yet, or an empty string; put the key version of the run in force if it is waiting.

        Args:
            plan: the run plan.
            key_version: of the run's last round; None if it has had none.

        Raises:
            UntrustedError: the run can never be served, because its keys were replaced before it began.
        """
        if self.roster.sequence < plan.roster_sequence:
            return f"run {plan.run} was signed under roster {plan.roster_sequence}, this is {self.roster.sequence}"
        newest = max(plan.roster_sequence, key_version or 0)
        grant = self.newer(plan.roster_sequence)
        if grant is not None:
            self.promote(grant)
        held = self.grant.keys_since
        if held > newest:
            raise UntrustedError(
                f"run {plan.run} was made with keys that have been replaced since",
                hint="have the owner sign it again: shoal-fleet run start",
            )
        if held < self.roster.keys_since <= plan.roster_sequence:
            return f"run {plan.run} was made with newer keys than we have"
        return ""


def init(directory: Path, name: str = "aggregator") -> Path:
    """Make the aggregator's keys and its directory for runs; return the path of the card for the owner."""
    card = make_identity(directory, name, AGGREGATOR_ROLE)
    private_directory(directory / RUNS_DIRECTORY)
    return card


def join(directory: Path, grant_file: bytes, owner_fingerprint: str) -> AggregatorMembership:
    """Accept the owner's grant and return the membership."""
    accept_grant(directory, grant_file, AggregatorGrant, owner_fingerprint)
    return AggregatorMembership(directory)
