"""Certificates of model states: only distinct devices of the roster count, each with its own signature."""

import dataclasses

import pytest

import shoal.membership.statements as module
from crypto.seal.identity import Identity, sign_document
from shoal.errors import UntrustedError, UsageError, WireError
from shoal.membership.statements import (
    Claim,
    check_certificate,
    check_claims,
    open_statement,
    read_claims,
    sign_statement,
    signers_needed,
)
from shoal.protocol.documents import Card
from shoal.protocol.states import HeldState, StateCertificate, Statement
from tests.helpers.model_states import FLEET, IDENTITIES, RUN_ID, roster

HELD = HeldState(0, 6, b"d" * 32)
OTHER = HeldState(1, 6, b"e" * 32)


def statement(device, **changes):
    fields = {"fleet": FLEET, "run_id": RUN_ID, "round": 7, "device": device, "states": (HELD, OTHER)} | changes
    return Statement(**fields)


def signed(identity, **changes):
    return sign_statement(identity, statement(identity.name, **changes))


def check(*statements, need=2, held=HELD, of=None):
    return check_certificate(
        StateCertificate(statements),
        held,
        fleet=FLEET,
        run_id=RUN_ID,
        roster=of or roster(),
        needed=need,
    )


EACH = [signed(identity) for identity in IDENTITIES]


def test_enough_devices_certify_every_state(monkeypatch):
    """Verification stops at the last signature needed; a statement of an earlier round does not hide a later one."""
    assert check(*EACH[:3], need=3) == ("dev-0", "dev-1", "dev-2")
    assert check(*EACH[:3], need=3, held=OTHER) == ("dev-0", "dev-1", "dev-2")
    assert check(signed(IDENTITIES[0], round=6, states=(OTHER,)), *EACH[:2]) == ("dev-0", "dev-1")
    calls, real = [], module.open_statement
    monkeypatch.setattr(module, "open_statement", lambda *a: calls.append(a) or real(*a))
    check(*EACH, need=2)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("statements", "of"),
    [
        (EACH[:1], roster()),
        ((EACH[0], signed(IDENTITIES[0], round=8)), roster()),
        (EACH[:2], roster(revoked=("dev-1",))),
        (EACH[:2], roster(IDENTITIES[1:])),
        ((EACH[0], signed(Identity.generate("dev-1"))), roster()),
    ],
    ids=["one", "twice the same", "one is revoked", "one is unknown", "a stranger with a member's name"],
)
def test_too_few_devices_certify_nothing(statements, of):
    with pytest.raises(UntrustedError, match="1 devices of the roster have signed state 6 of model 0, 2 are needed"):
        check(*statements, of=of)
    assert len(check(*statements, EACH[2], of=of)) == 2


def test_no_device_certifies_nothing():
    """A certificate of no device is a mistake of the caller, and so is a statement of another."""
    with pytest.raises(UntrustedError):
        check()
    with pytest.raises(UsageError):
        check(EACH[0], need=0)
    with pytest.raises(UsageError, match="can't sign"):
        sign_statement(IDENTITIES[0], dataclasses.replace(statement("dev-0"), device="dev-1"))


@pytest.mark.parametrize(
    "changes",
    [
        {"fleet": "other"},
        {"run_id": b"x" * 16},
        {"states": (HeldState(0, 6, b"x" * 32), OTHER)},
        {"states": (HeldState(0, 7, HELD.digest), OTHER)},
        {"states": (HeldState(2, 6, HELD.digest),)},
        {"states": ()},
    ],
)
def test_other_statements_do_not_count(changes):
    """Statements about anything else do not count."""
    with pytest.raises(UntrustedError, match="1 devices"):
        check(signed(IDENTITIES[0]), signed(IDENTITIES[1], **changes))


def test_forged_statements_hide_no_others():
    """Forged and malformed statements do not count and hide no others."""
    good = [signed(identity) for identity in IDENTITIES[:2]]
    altered = bytearray(signed(IDENTITIES[2]))
    altered[3] ^= 1  # in the signature
    card = sign_document(IDENTITIES[3], Card("device", IDENTITIES[3].member))
    bad = [b"", b"short", bytes(200), bytes(altered), card, good[0][:-1]]
    assert check(*bad, *good) == ("dev-0", "dev-1")
    with pytest.raises(UntrustedError, match="1 devices"):
        check(*bad, good[0])


def test_documents_are_read_once_for_all():
    """Documents are read once for every state that is checked."""
    good = [signed(identity) for identity in IDENTITIES[:2]]
    claims = tuple(read_claims([b"short", *good, good[0][:-1]]))
    assert claims == tuple(Claim(statement(f"dev-{i}"), good[i]) for i in range(2))
    for held in (HELD, OTHER):
        expected = {"fleet": FLEET, "run_id": RUN_ID, "roster": roster(), "needed": 2}
        assert check_claims(claims, held, **expected) == ("dev-0", "dev-1")


def test_claim_is_checked_by_its_signature():
    """A claim is checked by its signature not its contents."""
    forged = Claim(statement("dev-1"), signed(Identity.generate("dev-1")))
    with pytest.raises(UntrustedError, match="1 devices"):
        check_claims(
            (*read_claims([signed(IDENTITIES[0])]), forged),
            HELD,
            fleet=FLEET,
            run_id=RUN_ID,
            roster=roster(),
            needed=2,
        )


def test_statement_opens_to_what_was_signed():
    assert open_statement(signed(IDENTITIES[1]), roster()) == statement("dev-1")
    with pytest.raises(UntrustedError, match="not in the roster"):
        open_statement(signed(IDENTITIES[1]), roster(revoked=("dev-1",)))
    with pytest.raises(WireError):
        open_statement(b"", roster())


@pytest.mark.parametrize(
    ("least", "needed"),
    [
        (1, [1, 1, 1, 1, 1, 1, 1]),
        (2, [2, 2, 2, 2, 2, 2, 2]),
        (3, [2, 2, 2, 2, 3, 3, 3]),
        (5, [2, 2, 2, 2, 3, 3, 4]),
    ],
)
def test_majority_certifies_in_a_small_fleet(least, needed):
    """Of 1 to 7 devices; never fewer than two if a mean takes several."""
    assert [signers_needed(least, active) for active in range(1, 8)] == needed
    assert signers_needed(least, 1000) == least
