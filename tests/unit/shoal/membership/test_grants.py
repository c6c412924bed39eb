"""Signed documents, cards and grants, and the receiving keys to which grants are sealed."""

import dataclasses

import pytest

from crypto.seal.envelope import SealError, seal_to_member
from crypto.seal.identity import Identity, fingerprint, open_document, sign_document
from crypto.seal.receiving import ReceivingSecrets
from shoal import limits
from shoal.errors import UntrustedError, WireError
from shoal.membership import grants
from shoal.membership.grants import (
    AGGREGATOR_ROLE,
    DEVICE_ROLE,
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
    sealing_key,
)
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import (
    AggregatorGrant,
    Card,
    DeviceGrant,
    GrantFile,
    ReceivingKeys,
    ReceivingNotice,
    Roster,
    RunPlan,
)
from shoal.protocol.messages import Sealed
from tests.helpers.earlier_formats import EARLIER_KINDS, earlier_grant
from tests.helpers.plans import run_plan
from tests.helpers.receiving import RECEIVING, device_card
from tests.helpers.refusals import refused

OWNER, DEVICE, EVE = (Identity.generate(n) for n in ("owner", "dev-1", "eve"))
ROSTER = Roster(
    fleet="demo", sequence=5, issued_at_s=100, expires_at_s=200, aggregator=None, devices=(DEVICE.member,), revoked=()
)


# ---------------------------------------------------------------------------------------------------- documents


def test_altered_document_is_refused():
    """Anywhere. The signature covers the type, so a roster can't pass as another document."""
    data = sign_document(OWNER, ROSTER)
    assert open_document(data, Roster, OWNER.member.sign_key) == ROSTER
    with pytest.raises(UntrustedError):
        open_document(data, RunPlan, OWNER.member.sign_key)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 4
        with pytest.raises((UntrustedError, WireError)):
            open_document(bytes(broken), Roster, OWNER.member.sign_key)


def test_plan_of_another_version_says_so():
    """As every plan did before it had capabilities: its last six bytes are missing."""
    content = encode(run_plan())[:-6]
    signed = OWNER.sign("document/RunPlan", content) + content
    with refused(WireError, "this RunPlan was signed by another version of Shoal", hint="have it signed again"):
        open_document(signed, RunPlan, OWNER.member.sign_key)


@pytest.mark.parametrize("length", [0, 1, 63, 64])
def test_document_outgrows_its_signature(length):
    """A document is longer than its signature."""
    with pytest.raises(WireError, match="too short"):
        open_document(bytes(length), Roster, OWNER.member.sign_key)


# ---------------------------------------------------------------------------------------------------- cards, grants


def test_card_proves_possession_of_its_key():
    assert open_card(device_card(DEVICE)) == Card(DEVICE_ROLE, DEVICE.member, RECEIVING.public)


@pytest.mark.parametrize(
    ("card", "error", "match"),
    [
        (sign_document(EVE, Card(DEVICE_ROLE, DEVICE.member)), UntrustedError, None),
        (make_card(EVE, "owner"), WireError, "role 'owner'"),
        (sign_document(DEVICE, Card("device", DEVICE.member)), WireError, "'device' without receiving keys"),
        (make_card(DEVICE, "aggregator", RECEIVING.public), WireError, "'aggregator' with receiving keys"),
        (
            sign_document(DEVICE, Card(DEVICE_ROLE, dataclasses.replace(DEVICE.member, seal_key=bytes(32)))),
            WireError,
            "nothing can be sealed to it",
        ),
        (b"", WireError, None),
        (b"x" * 64, WireError, None),
        (b"x" * 300, WireError, None),
    ],
    ids=[
        *("another's keys", "role", "no receiving keys", "receiving keys of an aggregator", "unusable seal key"),
        *("empty", "junk", "long junk"),
    ],
)
def test_other_cards_are_refused(card, error, match):
    with pytest.raises(error, match=match):
        open_card(card)


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
    for print_ in (PRINT, f"  {PRINT.upper()} "):
        assert open_grant(DEVICE, data, DeviceGrant, print_, RECEIVING) == device_grant()
    assert [secret for secret in (b"VVVV", b"BBBB") if secret in data] == []


RENAMED = Identity("dev-2", DEVICE.sign_private, DEVICE.seal_private)
AGGREGATORS = AggregatorGrant(
    fleet="demo",
    owner_key=OWNER.member.sign_key,
    broker="mqtt://x",
    roster=b"",
    keys_since=0,
    broadcast_key=b"B" * 32,
)
CONTROL = seal_to_member(
    OWNER, DEVICE.member.seal_key, Sealed("demo", "control", "owner", "dev-1"), encode(device_grant())
)


@pytest.mark.parametrize(
    ("data", "who", "kind", "error", "match", "hint"),
    [
        (
            seal_grant(EVE, CARD, device_grant(owner_key=EVE.member.sign_key)),
            DEVICE,
            DeviceGrant,
            UntrustedError,
            fingerprint(EVE.member),
            "shoal-fleet show",
        ),
        (
            seal_grant(OWNER, CARD, device_grant(owner_key=EVE.member.sign_key)),
            DEVICE,
            DeviceGrant,
            UntrustedError,
            "another owner",
            "",
        ),
        (
            seal_grant(OWNER, CARD, device_grant()),
            EVE,
            DeviceGrant,
            UntrustedError,
            "not for the keys of 'eve' here",
            "it is for 'dev-1'",
        ),
        (seal_grant(OWNER, CARD, device_grant()), RENAMED, DeviceGrant, UntrustedError, "for 'dev-1' as device", ""),
        (
            seal_grant(OWNER, Card(AGGREGATOR_ROLE, DEVICE.member), AGGREGATORS),
            DEVICE,
            DeviceGrant,
            UntrustedError,
            "as aggregator",
            "",
        ),
        (
            seal_grant(OWNER, CARD, device_grant()),
            DEVICE,
            AggregatorGrant,
            UntrustedError,
            "is not for the keys of",
            "",
        ),
        (
            encode(GrantFile(OWNER.member, CONTROL)),
            DEVICE,
            DeviceGrant,
            WireError,
            "a control where a grant belongs",
            "",
        ),
    ],
    ids=[
        *("another owner's", "pins another owner", "another device's", "a renamed key file", "the aggregator's"),
        *("to the aggregator", "for another purpose"),
    ],
)
def test_other_grants_are_refused(data, who, kind, error, match, hint):
    """A device's grant never becomes the aggregator's, and the reverse."""
    held = ReceivingSecrets.generate() if who is EVE else RECEIVING
    with refused(error, match, hint=hint):
        open_grant(who, data, kind, PRINT, held if kind is DeviceGrant else None)


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


def test_keys_come_from_pinned_owner_only():
    """A member pins the owner's signing key when it joins; the display name and the fingerprint no longer count."""
    data = seal_grant(OWNER, CARD, device_grant(roster=b""))
    assert opened(data, RECEIVING) == device_grant(roster=b"")
    forged = seal_grant(EVE, CARD, device_grant(owner_key=EVE.member.sign_key))
    with pytest.raises(UntrustedError, match=f"keys from owner {fingerprint(EVE.member)}, who is not this fleet's"):
        opened(forged, RECEIVING)
    file = decode(seal_grant(EVE, CARD, device_grant()), GrantFile)
    with pytest.raises(UntrustedError):
        opened(encode(GrantFile(OWNER.member, file.sealed)), RECEIVING)
    with pytest.raises(UntrustedError):
        opened(data, RECEIVING, EVE)


@pytest.mark.parametrize("kind", EARLIER_KINDS)
def test_earlier_version_is_refused(kind):
    """A grant of an earlier version is refused with what to do."""
    grant = device_grant()
    label = GrantLabel.of(grant)
    head = label.head(grant.fleet, DEVICE.name)
    sealed = seal_to_member(OWNER, sealing_key(CARD, label), head, earlier_grant(grant, kind))
    with refused(
        WireError, "a grant of another version of Shoal", hint="run the same version here and on the owner's machine"
    ):
        open_grant(DEVICE, encode(GrantFile(OWNER.member, sealed)), DeviceGrant, PRINT, RECEIVING)


# -- receiving keys: the label in a grant's head, notices, and grants under keys that are erased --


HELD = ReceivingSecrets.generate()
HELD_CARD = open_card(make_card(DEVICE, "device", HELD.public))


def grant(receiving=3):
    return device_grant(roster=b"", keys_since=7, receiving=receiving)


def opened(data, held=HELD, identity=DEVICE):
    return open_renewal(identity, data, DeviceGrant, OWNER.member.sign_key, held)


@pytest.mark.parametrize("number", [1, 3, 8])
def test_grant_opens_with_the_named_key(number):
    """A grant opens with the receiving key that it names."""
    data = seal_grant(OWNER, HELD_CARD, grant(number))
    assert opened(data) == grant(number)
    assert peek_grant(data) == GrantLabel("device", 7, number)


def test_the_seal_key_does_not_open_it():
    file = decode(seal_grant(OWNER, HELD_CARD, grant()), GrantFile)
    head, at = grants.read_head(file.sealed)
    with pytest.raises(SealError):
        grants.open_from_member(DEVICE, file.sealed, head, at, OWNER.member.sign_key)


def test_erased_key_says_what_to_do():
    """A grant under an erased key says what to do."""
    data = seal_grant(OWNER, HELD_CARD, grant())
    for held in (HELD.after(3), HELD.after(11), None):
        with refused(ErasedKeyError, "receiving key 3 of 'dev-1', which is erased", hint_is=ERASED_HINT):
            opened(data, held)
        with pytest.raises(ErasedKeyError):
            open_grant(DEVICE, data, DeviceGrant, fingerprint(OWNER.member), held)


def test_altered_grant_says_nothing():
    """Only the owner's own grants give the hint."""
    file = decode(seal_grant(OWNER, HELD_CARD, grant()), GrantFile)
    broken = encode(dataclasses.replace(file, sealed=file.sealed[:-1] + bytes([file.sealed[-1] ^ 1])))
    with pytest.raises(SealError):
        opened(broken, HELD.after(3))


def test_grant_under_seal_key_is_refused(monkeypatch):
    """As owners of earlier versions sealed them."""
    monkeypatch.setattr(grants, "sealing_key", lambda card, _label: card.member.seal_key)
    with pytest.raises(SealError):
        opened(seal_grant(OWNER, HELD_CARD, grant()))
    with pytest.raises(ErasedKeyError):
        opened(seal_grant(OWNER, HELD_CARD, grant(receiving=0)))


def test_a_label_must_agree_with_the_grant(monkeypatch):
    monkeypatch.setattr(GrantLabel, "of", lambda _: GrantLabel("device", 8, 3))
    data = seal_grant(OWNER, HELD_CARD, grant())
    monkeypatch.undo()
    with pytest.raises(UntrustedError, match="does not agree with its contents"):
        opened(data)


@pytest.mark.parametrize(
    "purpose", ["grant", "grant/device", "grant/device/7", "grant/device/7/x", "roster/7/3", f"grant/device/{10**11}/1"]
)
def test_other_purposes_are_no_grant(purpose):
    with pytest.raises(WireError, match="where a grant belongs"):
        GrantLabel.read(Sealed("demo", purpose, "owner", "dev-1"))


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
