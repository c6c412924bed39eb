"""A certificate needs signatures of more than half of one roster of the owner's, over this checkpoint, each device once."""

import dataclasses

import pytest

from crypto.seal.identity import Identity
from crypto.seal.signed import sign_document
from shoal.errors import UntrustedError, WireError
from shoal.membership.certificates import certify, check_certificate, has_signed, majority, sign_checkpoint
from shoal.protocol.codec import decode, encode
from shoal.protocol.epochs import Certificate, Checkpoint, SignedBy
from tests.helpers.plans import run_plan
from tests.helpers.rollovers import DEVICES, IDENTITIES, OWNER, make_checkpoint, make_roster

RUN = run_plan()
CHECKPOINT = make_checkpoint(RUN)
ROSTER, ROSTER_BYTES = make_roster()


def signatures(*devices, checkpoint=CHECKPOINT):
    return {d: sign_checkpoint(IDENTITIES[d], checkpoint) for d in devices}


def certificate(given, checkpoint=CHECKPOINT, roster=ROSTER_BYTES):
    """Return a certificate without checking the signatures."""
    pairs = given.items() if isinstance(given, dict) else given
    return Certificate(checkpoint, roster, tuple(SignedBy(d, s) for d, s in pairs))


def check(given, **options):
    return check_certificate(
        given, **{"owner_key": OWNER.member.sign_key, "fleet": "demo", "least_sequence": 0, **options}
    )


@pytest.mark.parametrize(("devices", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (100, 51), (101, 51)])
def test_more_than_half(devices, needed):
    assert majority(devices) == needed
    assert 2 * needed > devices >= 2 * (needed - 1)


def test_three_of_four_are_enough():
    made = certify(CHECKPOINT, ROSTER, ROSTER_BYTES, signatures(*DEVICES[:3]))
    assert check(made) == (CHECKPOINT, ROSTER)
    assert check(decode(encode(made), Certificate)) == (CHECKPOINT, ROSTER)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_half_is_too_few(count):
    given = signatures(*DEVICES[:count])
    assert certify(CHECKPOINT, ROSTER, ROSTER_BYTES, given) is None
    with pytest.raises(UntrustedError, match=f"{count} signatures of 4 devices"):
        check(certificate(given))


FORGED = {
    "of another checkpoint": {"dev-3": sign_checkpoint(IDENTITIES["dev-3"], make_checkpoint(RUN, 3))},
    "of somebody else under the device's name": {"dev-3": sign_checkpoint(IDENTITIES["dev-4"], CHECKPOINT)},
    "of nobody in the roster": {"dev-5": sign_checkpoint(IDENTITIES["dev-5"], CHECKPOINT)},
    "of no device at all": {"dev-3": bytes(64)},
    "over the checkpoint for another purpose": {"dev-3": IDENTITIES["dev-3"].sign("plan", encode(CHECKPOINT))},
    "of a namesake": {"dev-3": sign_checkpoint(Identity.generate("dev-3"), CHECKPOINT)},
}


@pytest.mark.parametrize("case", FORGED)
def test_a_third_signature_that_does_not_hold_counts_for_nothing(case):
    given = signatures("dev-1", "dev-2") | FORGED[case]
    assert certify(CHECKPOINT, ROSTER, ROSTER_BYTES, given) is None
    with pytest.raises(UntrustedError, match="2 signatures of 4"):
        check(certificate(given))


def test_signatures_that_do_not_hold_spoil_nothing():
    given = signatures(*DEVICES[:3]) | FORGED["of nobody in the roster"]
    assert check(certificate(given))[0] == CHECKPOINT
    assert [s.device for s in certify(CHECKPOINT, ROSTER, ROSTER_BYTES, given).signatures] == list(DEVICES[:3])


def test_one_signature_twice_is_not_two():
    given = signatures("dev-1", "dev-2")
    with pytest.raises(UntrustedError, match="names a device twice"):
        check(certificate([*given.items(), ("dev-2", given["dev-2"])]))


def test_a_revoked_device_neither_signs_nor_counts():
    """Of two that are left, both must sign."""
    roster, data = make_roster(revoked=("dev-3", "dev-4"))
    given = signatures("dev-1", "dev-3", "dev-4")
    assert certify(CHECKPOINT, roster, data, given) is None
    with pytest.raises(UntrustedError, match="1 signatures of 2 devices"):
        check(certificate(given, roster=data))
    assert check(certificate(signatures("dev-1", "dev-2"), roster=data))[1] == roster


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"fleet": "other"}, "of fleet 'other'"),
        ({"generation": 3}, "keys of roster 3 with a roster of keys 0"),
    ],
)
def test_a_checkpoint_for_another_fleet_or_other_secrets(changes, match):
    other = make_checkpoint(RUN, **changes)
    with pytest.raises(UntrustedError, match=match):
        check(certificate(signatures(*DEVICES, checkpoint=other), other))


def test_a_checkpoint_under_secrets_that_this_roster_has_replaced():
    """The roster revokes a device; the checkpoint is made with the secrets that this device knows."""
    _, data = make_roster(sequence=5, revoked=("dev-4",), keys_since=5)
    with pytest.raises(UntrustedError, match="keys of roster 0 with a roster of keys 5"):
        check(certificate(signatures(*DEVICES[:3]), roster=data))


def test_the_roster_must_be_the_owners():
    _, data = make_roster(owner=Identity.generate("owner"))
    with pytest.raises(UntrustedError, match="signature"):
        check(certificate(signatures(*DEVICES), roster=data))


def test_the_roster_must_be_of_the_fleet():
    _, data = make_roster(fleet="other")
    with pytest.raises(UntrustedError, match="a roster of fleet 'other'"):
        check(certificate(signatures(*DEVICES), roster=data))


def test_the_roster_must_not_be_older_than_asked():
    """A small early roster must not decide for devices that joined later."""
    small, data = make_roster(DEVICES[:1], sequence=2)
    given = certificate(signatures("dev-1"), roster=data)
    assert check(given, least_sequence=2)[1] == small
    with pytest.raises(UntrustedError, match="2 after 3: refused as a rollback"):
        check(given, least_sequence=3)


def test_an_expired_roster_still_certifies():
    """Whether it has run out is asked of the newest one."""
    old = dataclasses.replace(ROSTER, expires_at_s=1)
    assert check(certificate(signatures(*DEVICES), roster=sign_document(OWNER, old)))[1] == old


@pytest.mark.parametrize("field", ["round", "epoch", "next_epoch", "key_id", "origins", "digest", "run_id"])
def test_every_field_is_signed(field):
    value = {"key_id": bytes(16), "digest": bytes(32), "run_id": bytes(16), "next_epoch": 9}.get(field, 0)
    value = 2 if field == "origins" else value
    other = dataclasses.replace(CHECKPOINT, **{field: value})
    assert other != CHECKPOINT
    signature = sign_checkpoint(IDENTITIES["dev-1"], CHECKPOINT)
    assert has_signed(IDENTITIES["dev-1"].member, CHECKPOINT, signature)
    assert not has_signed(IDENTITIES["dev-1"].member, other, signature)


@pytest.mark.parametrize(
    "changes", [{"next_epoch": 1}, {"next_epoch": 0}, {"origins": 0}, {"origins": 4097}, {"fleet": "../up"}]
)
def test_a_checkpoint_that_makes_no_sense_is_no_checkpoint(changes):
    with pytest.raises(WireError):
        Checkpoint(**{f.name: getattr(CHECKPOINT, f.name) for f in dataclasses.fields(CHECKPOINT)} | changes)
