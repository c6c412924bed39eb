"""Signatures on a checkpoint, and what makes enough of them: more than half of the roster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from crypto.seal.identity import Identity, verify
from shoal.errors import UntrustedError
from shoal.membership.roster import open_roster
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member, Roster
from shoal.protocol.epochs import Certificate, Checkpoint, SignedBy

CHECKPOINT_PURPOSE: Final = "checkpoint"


def majority(devices: int) -> int:
    """Return how many of ``devices`` are more than half."""
    return devices // 2 + 1


def sign_checkpoint(identity: Identity, checkpoint: Checkpoint) -> bytes:
    """Return the 64 bytes by which a device says that its own fold is the same."""
    return identity.sign(CHECKPOINT_PURPOSE, encode(checkpoint))


def has_signed(member: Member, checkpoint: Checkpoint, signature: bytes) -> bool:
    """Whether ``signature`` (64 bytes) is the member's over ``checkpoint``."""
    try:
        verify(member.sign_key, CHECKPOINT_PURPOSE, encode(checkpoint), signature)
    except UntrustedError:
        return False
    return True


def certify(
    checkpoint: Checkpoint, roster: Roster, roster_bytes: bytes, signatures: Mapping[str, bytes]
) -> Certificate | None:
    """Return the certificate, or None where the signatures that hold are not those of more than half of the roster.

    Args:
        checkpoint: what was signed.
        roster: the newest.
        roster_bytes: the same as the owner signed it.
        signatures: device -> 64 bytes.
    """
    held = []
    for device, signature in sorted(signatures.items()):
        member = roster.device(device)
        if member is not None and has_signed(member, checkpoint, signature):
            held.append(SignedBy(device, signature))
    if len(held) < majority(len(roster.active())):
        return None
    return Certificate(checkpoint, roster_bytes, tuple(held))


def check_certificate(
    certificate: Certificate, *, owner_key: bytes, fleet: str, least_sequence: int
) -> tuple[Checkpoint, Roster]:
    """Return the checkpoint and its roster, if more than half of that signed it.

    The roster is that of the certificate, since a newer one counts devices that were not there yet. It must be one from
    after the secrets were drawn that the epoch is made with: no device in it has been revoked since.

    Args:
        certificate: as it came.
        owner_key: the pinned owner's Ed25519 key, 32 bytes.
        fleet: whose it must be.
        least_sequence: oldest roster that is accepted.

    Raises:
        UntrustedError: another fleet's, too few signatures, or a roster that is not the owner's or too old.
    """
    checkpoint = certificate.checkpoint
    if checkpoint.fleet != fleet:
        raise UntrustedError(f"a checkpoint of fleet {checkpoint.fleet!r}")
    # Whether the owner has let the roster run out is asked of the newest one, not of this.
    roster = open_roster(certificate.roster, owner_key=owner_key, fleet=fleet, least_sequence=least_sequence, now_s=0)
    if roster.keys_since != checkpoint.generation:
        raise UntrustedError(
            f"a checkpoint under keys of roster {checkpoint.generation} with a roster of keys {roster.keys_since}"
        )
    signers = {s.device: s.signature for s in certificate.signatures}
    if len(signers) != len(certificate.signatures):
        raise UntrustedError("a certificate names a device twice")
    members = {d.name: d for d in roster.devices if d.name not in roster.revoked}
    held = sum(name in members and has_signed(members[name], checkpoint, s) for name, s in signers.items())
    if held < majority(len(members)):
        raise UntrustedError(f"a checkpoint with {held} signatures of {len(members)} devices")
    return checkpoint, roster
