"""Signed documents, rosters, grants and the high-water mark."""

import dataclasses

import pytest

from crypto.seal.envelope import seal_to_member
from crypto.seal.identity import Identity, fingerprint
from crypto.seal.replay import ReplayWatermark
from crypto.seal.signed import open_document, sign_document
from shoal.errors import UntrustedError, WireError
from shoal.membership.grants import AGGREGATOR_ROLE, DEVICE_ROLE, make_card, open_card, open_grant, seal_grant
from shoal.membership.roster import aggregator_of, open_roster
from shoal.protocol.codec import encode
from shoal.protocol.documents import AggregatorGrant, Card, DeviceGrant, GrantFile, Roster, RunPlan
from shoal.protocol.messages import Announcement, Sealed
from tests.helpers.plans import run_plan

OWNER, DEVICE, EVE = (Identity.generate(n) for n in ("owner", "dev-1", "eve"))
ROSTER = Roster(
    fleet="demo", sequence=5, issued_at_s=100, expires_at_s=200, aggregator=None, devices=(DEVICE.member,), revoked=()
)


# ---------------------------------------------------------------------------------------------------- documents


def test_a_signed_document_is_read_back():
    plan = run_plan()
    assert open_document(sign_document(OWNER, plan), RunPlan, OWNER.member.sign_key) == plan


def test_an_altered_document_is_refused_anywhere():
    data = sign_document(OWNER, ROSTER)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 4
        with pytest.raises((UntrustedError, WireError)):
            open_document(bytes(broken), Roster, OWNER.member.sign_key)


def test_a_plan_that_the_owner_signed_with_another_version_says_so():
    """As every plan did before it had capabilities: its last six bytes are missing."""
    content = encode(run_plan())[:-6]
    signed = OWNER.sign("document/RunPlan", content) + content
    with pytest.raises(WireError, match="this RunPlan was signed by another version of Shoal") as caught:
        open_document(signed, RunPlan, OWNER.member.sign_key)
    assert "have it signed again" in caught.value.hint


def test_a_signature_holds_for_one_type_of_document():
    """The signature covers the type, so a roster can't pass as another document."""
    data = sign_document(OWNER, ROSTER)
    with pytest.raises(UntrustedError):
        open_document(data, RunPlan, OWNER.member.sign_key)


@pytest.mark.parametrize("length", [0, 1, 63, 64])
def test_a_document_is_longer_than_its_signature(length):
    with pytest.raises(WireError, match="too short"):
        open_document(bytes(length), Roster, OWNER.member.sign_key)


# ---------------------------------------------------------------------------------------------------- rosters


def read(roster=ROSTER, signer=OWNER, **changes):
    arguments = {"owner_key": OWNER.member.sign_key, "fleet": "demo", "least_sequence": 5, "now_s": 150, **changes}
    return open_roster(sign_document(signer, roster), **arguments)


def test_the_owners_roster_is_read():
    assert read() == ROSTER
    assert read(now_s=200) == ROSTER, "the last second counts"
    assert read(least_sequence=4) == ROSTER


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"signer": EVE}, "not its sender's"),
        ({"fleet": "other"}, "a roster of fleet 'demo', not 'other'"),
        ({"least_sequence": 6}, "refused as a rollback"),
        ({"now_s": 201}, "expired"),
    ],
)
def test_other_rosters_are_refused(arguments, match):
    with pytest.raises(UntrustedError, match=match):
        read(**arguments)


def test_an_expired_roster_says_what_to_do():
    with pytest.raises(UntrustedError) as caught:
        read(now_s=10**10)
    assert "shoal-fleet renew" in caught.value.hint


def test_a_fleet_without_an_aggregator_says_so():
    with pytest.raises(UntrustedError, match="no aggregator"):
        aggregator_of(ROSTER)
    assert aggregator_of(dataclasses.replace(ROSTER, aggregator=EVE.member)) == EVE.member


# ---------------------------------------------------------------------------------------------------- cards, grants


def test_a_card_proves_the_possession_of_its_key():
    assert open_card(make_card(DEVICE, DEVICE_ROLE)) == Card(DEVICE_ROLE, DEVICE.member)


def test_a_card_with_anothers_keys_is_refused():
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
        "broadcast_key": b"B" * 32,
        "mask_secret": b"M" * 32,
        "content_key": b"C" * 32,
    }
    return DeviceGrant(**{**fields, **changes})


CARD = Card(DEVICE_ROLE, DEVICE.member)
PRINT = fingerprint(OWNER.member)


def test_a_grant_reaches_its_device():
    data = seal_grant(OWNER, CARD, device_grant())
    assert open_grant(DEVICE, data, DeviceGrant, PRINT) == device_grant()
    assert open_grant(DEVICE, data, DeviceGrant, f"  {PRINT.upper()} ") == device_grant()
    for secret in (b"MMMM", b"CCCC", b"BBBB"):
        assert secret not in data


def test_a_grant_of_another_owner_is_refused_with_both_fingerprints():
    data = seal_grant(EVE, CARD, device_grant(owner_key=EVE.member.sign_key))
    with pytest.raises(UntrustedError, match=fingerprint(EVE.member)) as caught:
        open_grant(DEVICE, data, DeviceGrant, PRINT)
    assert "shoal-fleet show" in caught.value.hint


def test_a_grant_for_somebody_else_is_refused():
    data = seal_grant(OWNER, CARD, device_grant())
    with pytest.raises(UntrustedError):
        open_grant(EVE, data, DeviceGrant, PRINT)


def test_a_grant_under_another_name_is_refused():
    """The keys fit, the name does not: a renamed key file does not become another device."""
    renamed = Identity("dev-2", DEVICE.sign_private, DEVICE.seal_private)
    with pytest.raises(UntrustedError, match="for 'dev-1' as device"):
        open_grant(renamed, seal_grant(OWNER, CARD, device_grant()), DeviceGrant, PRINT)


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
        open_grant(DEVICE, seal_grant(OWNER, card, aggregators), DeviceGrant, PRINT)
    with pytest.raises(UntrustedError, match="as device"):
        open_grant(DEVICE, seal_grant(OWNER, CARD, device_grant()), AggregatorGrant, PRINT)


def test_an_altered_grant_gives_the_true_one_or_none():
    """Only the giver's display name is not covered, and nothing is done with it."""
    data = seal_grant(OWNER, CARD, device_grant())
    taken = 0
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 2
        try:
            assert open_grant(DEVICE, bytes(broken), DeviceGrant, PRINT) == device_grant()
            taken += 1
        except (UntrustedError, WireError):
            continue
    assert taken <= len(OWNER.name)


def test_a_grant_that_pins_another_owner_is_refused():
    data = seal_grant(OWNER, CARD, device_grant(owner_key=EVE.member.sign_key))
    with pytest.raises(UntrustedError, match="another owner"):
        open_grant(DEVICE, data, DeviceGrant, PRINT)


def test_a_grant_sealed_for_another_purpose_is_refused():
    head = Sealed("demo", "control", "owner", "dev-1")
    sealed = seal_to_member(OWNER, DEVICE.member.seal_key, head, encode(device_grant()))
    with pytest.raises(UntrustedError):
        open_grant(DEVICE, encode(GrantFile(OWNER.member, sealed)), DeviceGrant, PRINT)


# ---------------------------------------------------------------------------------------------------- high water


def announced(run=2, round_=3, nonce=b"n" * 16, roster=5):
    return Announcement(
        fleet="demo",
        run=run,
        run_id=bytes(16),
        epoch=1,
        key_id=bytes(16),
        roster_sequence=roster,
        round=round_,
        nonce=nonce,
        deadline_s=1.0,
        finished=False,
        models=(),
        assignments=(),
        assignment_of=(),
        mode="permutation",
    )


MARK = ReplayWatermark(5, 2, 3, b"n" * 16)


@pytest.mark.parametrize(
    "later",
    [
        announced(),
        announced(round_=4, nonce=b"m" * 16),
        announced(run=3, round_=1, nonce=b"m" * 16),
        announced(roster=9),
    ],
)
def test_the_mark_moves_on(later):
    mark = MARK.accept(later)
    assert (mark.roster, mark.run, mark.round, mark.nonce) == (
        later.roster_sequence,
        later.run,
        later.round,
        later.nonce,
    )


@pytest.mark.parametrize(
    ("earlier", "match"),
    [
        (announced(round_=2), "after run 2 round 3"),
        (announced(run=1, round_=99), "after run 2 round 3"),
        (announced(nonce=b"m" * 16), "announced twice, differently"),
        (announced(round_=4, roster=4), "under roster 4 after 5"),
    ],
)
def test_the_mark_never_goes_back(earlier, match):
    with pytest.raises(UntrustedError, match=match):
        MARK.accept(earlier)


def test_the_first_announcement_is_always_news():
    assert ReplayWatermark().accept(announced()).round == 3
