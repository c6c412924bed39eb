"""Grants and receiving keys: the label in a grant's head, notices, and grants under keys that are erased."""

import dataclasses

import pytest

from crypto.seal.envelope import SealError
from crypto.seal.identity import Identity, fingerprint, sign_document
from crypto.seal.receiving import ReceivingSecrets
from shoal import limits
from shoal.errors import UntrustedError, WireError
from shoal.membership import grants
from shoal.membership.grants import (
    ERASED_HINT,
    ErasedKeyError,
    GrantLabel,
    make_card,
    open_card,
    open_grant,
    open_notice,
    open_renewal,
    peek_grant,
    seal_grant,
)
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Card, DeviceGrant, GrantFile, ReceivingKeys, ReceivingNotice
from shoal.protocol.messages import Sealed

OWNER, DEVICE, EVE = (Identity.generate(n) for n in ("owner", "dev-1", "eve"))
HELD = ReceivingSecrets.generate()
CARD = open_card(make_card(DEVICE, "device", HELD.public))


def grant(receiving=3, **changes):
    fields = {
        "fleet": "demo",
        "owner_key": OWNER.member.sign_key,
        "broker": "mqtt://x",
        "roster": b"",
        "keys_since": 7,
        "receiving": receiving,
        "broadcast_key": b"B" * 32,
        "version_secret": b"V" * 32,
    }
    return DeviceGrant(**{**fields, **changes})


def opened(data, held=HELD, identity=DEVICE):
    return open_renewal(identity, data, DeviceGrant, OWNER.member.sign_key, held)


@pytest.mark.parametrize("number", [1, 3, 8])
def test_grant_opens_with_the_named_key(number):
    """A grant opens with the receiving key that it names."""
    data = seal_grant(OWNER, CARD, grant(number))
    assert opened(data) == grant(number)
    assert peek_grant(data) == GrantLabel("device", 7, number)


def test_the_seal_key_does_not_open_it():
    file = decode(seal_grant(OWNER, CARD, grant()), GrantFile)
    head, at = grants.read_head(file.sealed)
    with pytest.raises(SealError):
        grants.open_from_member(DEVICE, file.sealed, head, at, OWNER.member.sign_key)


def test_erased_key_says_what_to_do():
    """A grant under an erased key says what to do."""
    data = seal_grant(OWNER, CARD, grant())
    for held in (HELD.after(3), HELD.after(11), None):
        with pytest.raises(ErasedKeyError, match="receiving key 3 of 'dev-1', which is erased") as caught:
            opened(data, held)
        assert caught.value.hint == ERASED_HINT
        with pytest.raises(ErasedKeyError):
            open_grant(DEVICE, data, DeviceGrant, fingerprint(OWNER.member), held)


def test_altered_grant_says_nothing():
    """Only the owner's own grants give the hint."""
    file = decode(seal_grant(OWNER, CARD, grant()), GrantFile)
    broken = encode(dataclasses.replace(file, sealed=file.sealed[:-1] + bytes([file.sealed[-1] ^ 1])))
    with pytest.raises(SealError):
        opened(broken, HELD.after(3))


def test_grant_under_seal_key_is_refused(monkeypatch):
    """As owners of earlier versions sealed them."""
    monkeypatch.setattr(grants, "sealing_key", lambda card, _label: card.member.seal_key)
    with pytest.raises(SealError):
        opened(seal_grant(OWNER, CARD, grant()))
    with pytest.raises(ErasedKeyError):
        opened(seal_grant(OWNER, CARD, grant(receiving=0)))


def test_a_label_must_agree_with_the_grant(monkeypatch):
    monkeypatch.setattr(GrantLabel, "of", lambda _: GrantLabel("device", 8, 3))
    data = seal_grant(OWNER, CARD, grant())
    monkeypatch.undo()
    with pytest.raises(UntrustedError, match="does not agree with its contents"):
        opened(data)


@pytest.mark.parametrize(
    "purpose", ["grant", "grant/device", "grant/device/7", "grant/device/7/x", "roster/7/3", f"grant/device/{10**11}/1"]
)
def test_other_purposes_are_no_grant(purpose):
    with pytest.raises(WireError, match="where a grant belongs"):
        GrantLabel.read(Sealed("demo", purpose, "owner", "dev-1"))


def test_only_devices_cards_have_keys():
    """A card has receiving keys if it is a devices."""
    with pytest.raises(WireError, match="'device' without receiving keys"):
        open_card(sign_document(DEVICE, Card("device", DEVICE.member)))
    with pytest.raises(WireError, match="'aggregator' with receiving keys"):
        open_card(make_card(DEVICE, "aggregator", HELD.public))


def test_a_notice_is_signed_by_its_device():
    notice = ReceivingNotice("demo", "dev-1", HELD.public)
    assert open_notice(sign_document(DEVICE, notice), DEVICE.member.sign_key) == notice
    with pytest.raises(UntrustedError, match="not its sender's"):
        open_notice(sign_document(EVE, notice), DEVICE.member.sign_key)


def test_points_of_small_order_are_refused():
    """Otherwise one device could prevent the owner from publishing any keys."""
    weak = ReceivingKeys(1, (*HELD.public.keys[:-1], bytes(32)))
    with pytest.raises(WireError, match="nothing can be sealed to it"):
        open_notice(sign_document(DEVICE, ReceivingNotice("demo", "dev-1", weak)), DEVICE.member.sign_key)
    with pytest.raises(WireError, match="nothing can be sealed to it"):
        open_card(make_card(DEVICE, "device", weak))


@pytest.mark.parametrize(("first", "count"), [(0, 8), (1, 0), (1, limits.RECEIVING_KEYS + 1), ((1 << 32) - 1, 8)])
def test_receiving_keys_are_counted(first, count):
    with pytest.raises(WireError, match=f"{count} receiving keys from number {first}"):
        ReceivingKeys(first, (bytes(32),) * count)
