"""Signed documents, cards and grants."""

import dataclasses

import pytest

from crypto.seal.envelope import seal_to_member
from crypto.seal.identity import Identity, fingerprint, open_document, sign_document
from crypto.seal.receiving import ReceivingSecrets
from shoal.errors import UntrustedError, WireError
from shoal.membership.grants import (
    AGGREGATOR_ROLE,
    DEVICE_ROLE,
    GrantLabel,
    make_card,
    open_card,
    open_grant,
    open_renewal,
    seal_grant,
    sealing_key,
)
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import AggregatorGrant, Card, DeviceGrant, GrantFile, Roster, RunPlan
from shoal.protocol.messages import Sealed
from tests.helpers.earlier_formats import EARLIER_KINDS, earlier_grant
from tests.helpers.plans import run_plan
from tests.helpers.receiving import RECEIVING, device_card

OWNER, DEVICE, EVE = (Identity.generate(n) for n in ("owner", "dev-1", "eve"))
ROSTER = Roster(
    fleet="demo", sequence=5, issued_at_s=100, expires_at_s=200, aggregator=None, devices=(DEVICE.member,), revoked=()
)


# ---------------------------------------------------------------------------------------------------- documents


def test_a_signed_document_is_read_back():
    plan = run_plan()
    assert open_document(sign_document(OWNER, plan), RunPlan, OWNER.member.sign_key) == plan


def test_altered_document_is_refused():
    """An altered document is refused anywhere."""
    data = sign_document(OWNER, ROSTER)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 4
        with pytest.raises((UntrustedError, WireError)):
            open_document(bytes(broken), Roster, OWNER.member.sign_key)


def test_plan_of_another_version_says_so():
    """As every plan did before it had capabilities: its last six bytes are missing."""
    content = encode(run_plan())[:-6]
    signed = OWNER.sign("document/RunPlan", content) + content
    with pytest.raises(WireError, match="this RunPlan was signed by another version of Shoal") as caught:
        open_document(signed, RunPlan, OWNER.member.sign_key)
    assert "have it signed again" in caught.value.hint


def test_signature_holds_for_one_type():
    """The signature covers the type, so a roster can't pass as another document."""
    data = sign_document(OWNER, ROSTER)
    with pytest.raises(UntrustedError):
        open_document(data, RunPlan, OWNER.member.sign_key)


@pytest.mark.parametrize("length", [0, 1, 63, 64])
def test_document_outgrows_its_signature(length):
    """A document is longer than its signature."""
    with pytest.raises(WireError, match="too short"):
        open_document(bytes(length), Roster, OWNER.member.sign_key)


# ---------------------------------------------------------------------------------------------------- cards, grants


def test_card_proves_possession_of_its_key():
    assert open_card(device_card(DEVICE)) == Card(DEVICE_ROLE, DEVICE.member, RECEIVING.public)


def test_card_with_borrowed_keys_is_refused():
    """A card with the keys of another party is refused."""
    stolen = Card(DEVICE_ROLE, dataclasses.replace(DEVICE.member, name="dev-1"))
    with pytest.raises(UntrustedError):
        open_card(sign_document(EVE, stolen))


def test_a_card_for_another_role_is_refused():
    with pytest.raises(WireError, match="role 'owner'"):
        open_card(make_card(EVE, "owner"))


@pytest.mark.parametrize("data", [b"", b"x" * 64, b"x" * 300])
def test_a_file_that_is_no_card_is_refused(data):
    with pytest.raises(WireError):
        open_card(data)


def device_grant(**changes):
    fields = {
        "fleet": "demo",
        "owner_key": OWNER.member.sign_key,
        "broker": "mqtt://x",
        "roster": sign_document(OWNER, ROSTER),
        "keys_since": ROSTER.keys_since,
        "receiving": 2,
        "broadcast_key": b"B" * 32,
        "version_secret": b"V" * 32,
    }
    return DeviceGrant(**{**fields, **changes})


CARD = Card(DEVICE_ROLE, DEVICE.member, RECEIVING.public)
PRINT = fingerprint(OWNER.member)


def test_a_grant_reaches_its_device():
    data = seal_grant(OWNER, CARD, device_grant())
    assert open_grant(DEVICE, data, DeviceGrant, PRINT, RECEIVING) == device_grant()
    assert open_grant(DEVICE, data, DeviceGrant, f"  {PRINT.upper()} ", RECEIVING) == device_grant()
    for secret in (b"VVVV", b"BBBB"):
        assert secret not in data


def test_another_owner_is_refused_by_print():
    """A grant of another owner is refused with both fingerprints."""
    data = seal_grant(EVE, CARD, device_grant(owner_key=EVE.member.sign_key))
    with pytest.raises(UntrustedError, match=fingerprint(EVE.member)) as caught:
        open_grant(DEVICE, data, DeviceGrant, PRINT, RECEIVING)
    assert "shoal-fleet show" in caught.value.hint


def test_another_device_is_refused_by_name():
    """A grant for another device is refused with its name."""
    data = seal_grant(OWNER, CARD, device_grant())
    with pytest.raises(UntrustedError, match="not for the keys of 'eve' here") as caught:
        open_grant(EVE, data, DeviceGrant, PRINT, ReceivingSecrets.generate())
    assert "it is for 'dev-1'" in caught.value.hint


def test_grant_under_another_name_is_refused():
    """A renamed key file does not make another device of its party."""
    renamed = Identity("dev-2", DEVICE.sign_private, DEVICE.seal_private)
    with pytest.raises(UntrustedError, match="for 'dev-1' as device"):
        open_grant(renamed, seal_grant(OWNER, CARD, device_grant()), DeviceGrant, PRINT, RECEIVING)


def test_a_grant_for_another_role_is_refused():
    """A device's grant never becomes the aggregator's, and the reverse."""
    aggregators = AggregatorGrant(
        fleet="demo",
        owner_key=OWNER.member.sign_key,
        broker="mqtt://x",
        roster=b"",
        keys_since=0,
        broadcast_key=b"B" * 32,
    )
    card = Card(AGGREGATOR_ROLE, DEVICE.member)
    with pytest.raises(UntrustedError, match="as aggregator"):
        open_grant(DEVICE, seal_grant(OWNER, card, aggregators), DeviceGrant, PRINT, RECEIVING)
    with pytest.raises(UntrustedError, match="is not for the keys of"):
        open_grant(DEVICE, seal_grant(OWNER, CARD, device_grant()), AggregatorGrant, PRINT)


def test_altered_grant_is_refused_or_true():
    """No signature covers the owner's display name, which nothing uses."""
    data = seal_grant(OWNER, CARD, device_grant())
    taken = 0
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 2
        try:
            assert open_grant(DEVICE, bytes(broken), DeviceGrant, PRINT, RECEIVING) == device_grant()
            taken += 1
        except (UntrustedError, WireError):
            continue
    assert taken <= len(OWNER.name)


def test_grant_pinning_another_owner():
    """A grant that pins another owner is refused."""
    data = seal_grant(OWNER, CARD, device_grant(owner_key=EVE.member.sign_key))
    with pytest.raises(UntrustedError, match="another owner"):
        open_grant(DEVICE, data, DeviceGrant, PRINT, RECEIVING)


def test_other_purpose_is_refused():
    """A grant sealed for another purpose is refused."""
    head = Sealed("demo", "control", "owner", "dev-1")
    sealed = seal_to_member(OWNER, DEVICE.member.seal_key, head, encode(device_grant()))
    with pytest.raises(WireError, match="a control where a grant belongs"):
        open_grant(DEVICE, encode(GrantFile(OWNER.member, sealed)), DeviceGrant, PRINT, RECEIVING)


def test_unusable_seal_key_is_refused():
    """A card with a key that nothing can be sealed to is refused."""
    card = Card(DEVICE_ROLE, dataclasses.replace(DEVICE.member, seal_key=bytes(32)))
    with pytest.raises(WireError, match="nothing can be sealed to it"):
        open_card(sign_document(DEVICE, card))


def test_keys_come_from_pinned_owner_only():
    """A member pins the owner's signing key when it joins; the display name and the fingerprint no longer count."""
    data = seal_grant(OWNER, CARD, device_grant(roster=b""))
    assert open_renewal(DEVICE, data, DeviceGrant, OWNER.member.sign_key, RECEIVING) == device_grant(roster=b"")
    forged = seal_grant(EVE, CARD, device_grant(owner_key=EVE.member.sign_key))
    with pytest.raises(UntrustedError, match=f"keys from owner {fingerprint(EVE.member)}, who is not this fleet's"):
        open_renewal(DEVICE, forged, DeviceGrant, OWNER.member.sign_key, RECEIVING)


def test_borrowed_owner_name_is_refused():
    """Eve names the owner's public keys in the file, but can't sign as the owner."""
    file = decode(seal_grant(EVE, CARD, device_grant()), GrantFile)
    with pytest.raises(UntrustedError):
        open_renewal(
            DEVICE, encode(GrantFile(OWNER.member, file.sealed)), DeviceGrant, OWNER.member.sign_key, RECEIVING
        )


def test_keys_for_another_device():
    """New keys for another device are refused."""
    with pytest.raises(UntrustedError):
        open_renewal(EVE, seal_grant(OWNER, CARD, device_grant()), DeviceGrant, OWNER.member.sign_key, RECEIVING)


@pytest.mark.parametrize("kind", EARLIER_KINDS)
def test_earlier_version_is_refused(kind):
    """A grant of an earlier version is refused with what to do."""
    grant = device_grant()
    label = GrantLabel.of(grant)
    head = label.head(grant.fleet, DEVICE.name)
    sealed = seal_to_member(OWNER, sealing_key(CARD, label), head, earlier_grant(grant, kind))
    with pytest.raises(WireError, match="a grant of another version of Shoal") as caught:
        open_grant(DEVICE, encode(GrantFile(OWNER.member, sealed)), DeviceGrant, PRINT, RECEIVING)
    assert "run the same version here and on the owner's machine" in caught.value.hint
