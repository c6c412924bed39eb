"""Certificates of a mask epoch: a checkpoint with the signatures of more than half of the roster's devices."""

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
    """Return the smallest number that is more than half of ``devices``."""
    return devices // 2 + 1


def sign_checkpoint(identity: Identity, checkpoint: Checkpoint) -> bytes:
    """Return the 64-byte signature by which a device confirms that its own fold gives the same origins."""
    return identity.sign(CHECKPOINT_PURPOSE, encode(checkpoint))


def has_signed(member: Member, checkpoint: Checkpoint, signature: bytes) -> bool:
    """Return whether ``signature`` (64 bytes) is the member's signature over ``checkpoint``."""
    try:
        verify(member.sign_key, CHECKPOINT_PURPOSE, encode(checkpoint), signature)
    except UntrustedError:
        return False
    return True


def certify(
    checkpoint: Checkpoint, roster: Roster, roster_bytes: bytes, signatures: Mapping[str, bytes]
) -> Certificate | None:
    """Return the certificate, or None if valid signatures are not more than half of the roster's active devices.

    Args:
        checkpoint: the signed checkpoint.
        roster: the newest roster.
        roster_bytes: the same roster as the owner signed it.
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
    """Check a certificate and return its checkpoint and its roster.

    Signatures are counted against the certificate's own roster, since a newer one may list devices that could not sign. That
    roster must be as new as the epoch's secrets, so that it lists no device that was revoked before they were drawn.

    Args:
        certificate: the received certificate.
        owner_key: the pinned owner's Ed25519 key, 32 bytes.
        fleet: the expected fleet.
        least_sequence: sequence of the oldest roster that is accepted.

    Raises:
        UntrustedError: another fleet's certificate, too few signatures, or a roster that is not the owner's or too old.
    """
    checkpoint = certificate.checkpoint
    if checkpoint.fleet != fleet:
        raise UntrustedError(f"a checkpoint of fleet {checkpoint.fleet!r}")
    # now_s=0: expiry is checked on the newest roster, and this one may be older.
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
