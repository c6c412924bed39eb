"""Statements that devices sign about their model states, and the certificates that the statements make.

A device signs with its own key, as a document of kind `Statement`. The aggregator collects statements and can't forge one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from crypto.seal.identity import Identity, check_document, peek_document, sign_document
from shoal.errors import ShoalError, UntrustedError, UsageError
from shoal.protocol.documents import Roster
from shoal.protocol.states import HeldState, StateCertificate, Statement

STATEMENTS_READ: Final = 1024
"""Most statements whose contents are remembered: the aggregator reads each four times in a round."""
FEWEST_SIGNERS: Final = 2
"""Fewest devices that certify a state in a fleet whose means take several: one alone could hand out any vector."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A received statement whose signature is not checked yet.

    Attributes:
        statement: the contents, which anyone may have written.
        signed: the document as received.
    """

    statement: Statement
    signed: bytes


def signers_needed(min_contributors: int, active: int) -> int:
    """Return how many devices must have signed a state's digest to certify it for another device.

    That is ``min_contributors``, or more than half of the other devices if that is less: in a fleet that has lost a device
    the others could otherwise hand on no state, and no newcomer could take its place.

    Args:
        min_contributors: from the run plan, at least 1.
        active: devices of the roster that are not revoked.
    """
    others = max(0, active - 1)
    return min(min_contributors, max(FEWEST_SIGNERS, others // 2 + 1))


def sign_statement(identity: Identity, statement: Statement) -> bytes:
    """Return the statement as a document signed by ``identity``.

    Raises:
        UsageError: the statement names another device.
    """
    if statement.device != identity.name:
        raise UsageError(f"{identity.name} can't sign the statement of {statement.device}")
    return sign_document(identity, statement)


@lru_cache(STATEMENTS_READ)
def peek_statement(signed: bytes) -> Statement:
    """Return a statement WITHOUT checking its signature.

    Raises:
        WireError: the bytes are not a statement.
    """
    return peek_document(signed, Statement)


def open_statement(signed: bytes, roster: Roster) -> Statement:
    """Return a statement after checking that the rostered device that it names has signed it.

    Raises:
        UntrustedError: the device is unknown or revoked, or did not sign it.
        WireError: the bytes are not a statement.
    """
    statement = peek_statement(signed)
    member = roster.device(statement.device)
    if member is None:
        raise UntrustedError("a statement of a device that is not in the roster")
    check_document(signed, Statement, member.sign_key)
    return statement


def read_claims(signed: Iterable[bytes]) -> Iterator[Claim]:
    """Yield the statements among received documents, one by one; bytes that are none are left out.

    A caller that checks several states reads the documents once and passes the claims to `check_claims` for each.
    """
    for document in signed:
        with suppress(ShoalError):  # the sender passed on bytes that are no statement
            yield Claim(peek_statement(document), document)


def check_certificate(
    certificate: StateCertificate,
    held: HeldState,
    *,
    fleet: str,
    run_id: bytes,
    roster: Roster,
    needed: int,
) -> tuple[str, ...]:
    """Check the claims of a certificate, see `check_claims`; statements after the last one needed are not read."""
    claims = read_claims(certificate.statements)
    return check_claims(claims, held, fleet=fleet, run_id=run_id, roster=roster, needed=needed)


def check_claims(
    claims: Iterable[Claim],
    held: HeldState,
    *,
    fleet: str,
    run_id: bytes,
    roster: Roster,
    needed: int,
) -> tuple[str, ...]:
    """Check that enough devices of the roster have signed a state's digest, and return the names of those devices.

    Claims after the last one needed are not looked at. Of several statements of one device about the state only the
    first counts, so that at most one signature is verified for each device.

    Args:
        claims: as received.
        held: the state and the digest to certify.
        fleet: the expected fleet.
        run_id: the expected run.
        roster: the newest roster; unknown and revoked devices don't count.
        needed: number of devices needed, at least 1.

    Raises:
        UntrustedError: fewer devices have signed it.
    """
    if needed < 1:
        raise UsageError(f"a certificate of {needed} devices")
    seen: set[str] = set()
    signers: list[str] = []
    for claim in claims:
        claimed = claim.statement
        # The signature is verified last, since that costs most.
        if claimed.device in seen or (claimed.fleet, claimed.run_id) != (fleet, run_id) or held not in claimed.states:
            continue
        seen.add(claimed.device)
        with suppress(ShoalError):  # a forged statement counts for nothing
            open_statement(claim.signed, roster)
            signers.append(claimed.device)
        if len(signers) == needed:
            return tuple(signers)
    raise UntrustedError(
        f"{len(signers)} devices of the roster have signed state {held.round} of model {held.model}, "
        f"{needed} are needed",
        hint="wait for a checkpoint that more devices have certified",
    )
