"""Run plans as the owner has signed them; those in another wire version are refused by name."""

from __future__ import annotations

from crypto.seal.identity import SIGNATURE_BYTES, open_document
from shoal.errors import WireError, WireVersionError
from shoal.protocol.documents import RunPackage, RunPlan, wire_of
from shoal.version import VERSION, WIRE


def open_plan(signed: bytes | memoryview, owner_key: bytes) -> RunPlan:
    """Check that the owner signed a run plan in a wire version that this software speaks, and return the plan.

    Args:
        signed: signature and encoded plan.
        owner_key: 32 bytes, Ed25519.

    Raises:
        UntrustedError: the signature is not by this key.
        WireVersionError: the plan is in another wire version, in which it may have other fields.
        WireError: the bytes are no plan.
    """
    try:
        plan = open_document(signed, RunPlan, owner_key)
    except WireError as error:
        # The signature is valid here, or there are too few bytes for one, which `wire_of` refuses.
        _check(wire_of(memoryview(signed)[SIGNATURE_BYTES:]), error)
        raise
    _check(plan.wire)
    return plan


def open_package(package: RunPackage, owner_key: bytes) -> RunPlan:
    """Return the plan of a run package: as the owner has signed it, or that of a later turn of a standing order.

    Raises:
        UntrustedError, WireVersionError: as `open_plan`.
        WireError: as `open_plan`, or the signed plan allows no such turn.
    """
    plan = open_plan(package.plan, owner_key)
    return plan.at_turn(package.turn, package.models) if package.turn else plan


def _check(version: int, cause: WireError | None = None) -> None:
    if version != WIRE:
        message = f"a run in wire version {version}, and this software (shoal {VERSION}) speaks {WIRE}"
        raise WireVersionError(message, later=version > WIRE) from cause
