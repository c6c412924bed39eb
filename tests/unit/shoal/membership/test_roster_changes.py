"""A roster as a change: applied, it gives the very bytes that the owner signed, or nothing that a reader would accept."""

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.seal.identity import Identity, sign_document
from shoal import limits
from shoal.errors import UntrustedError, WireError
from shoal.membership.roster import apply_change, open_roster, shortened
from shoal.membership.roster_changes import roster_change
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member, Roster

OWNER, EVE = Identity.generate("owner"), Identity.generate("owner")


def member(number, keys=0):
    seed = f"{number}/{keys}".encode()
    return Member(f"dev-{number}", hashlib.sha256(b"sign" + seed).digest(), hashlib.sha256(b"seal" + seed).digest())


def roster_of(count, sequence=5, **changes):
    return dataclasses.replace(
        Roster(
            fleet="reef",
            sequence=sequence,
            issued_at_s=100,
            expires_at_s=200,
            aggregator=member(10**6),
            devices=tuple(map(member, range(count))),
            revoked=(),
        ),
        **changes,
    )


@st.composite
def successions(draw):
    """Return a roster and a later one: devices are added and change keys, and are revoked and let in again."""
    count = draw(st.integers(0, 6))
    names = [f"dev-{i}" for i in range(count + 4)]
    texts = st.sampled_from(["", "site=a", "name=b,site=a"])
    gone = tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=4)))
    before = roster_of(count, revoked=gone, labels=shortened(draw(texts) for _ in range(count)))
    devices = [member(i, draw(st.integers(0, 1))) for i in range(count + draw(st.integers(0, 3)))]
    after = Roster(
        fleet="reef",
        sequence=draw(st.integers(5, 9)),
        issued_at_s=draw(st.integers(0, 2**40)),
        expires_at_s=draw(st.integers(0, 2**40)),
        aggregator=draw(st.sampled_from([None, member(10**6), member(10**6, 1)])),
        devices=tuple(devices),
        revoked=tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=4))),
        keys_since=draw(st.integers(0, 5)),
        labels=shortened(draw(texts) for _ in devices),
        later=draw(st.sampled_from([(), ((1, b"of a later version"), (9, b""))])),
    )
    return before, after


@given(successions())
def test_change_gives_the_signed_bytes(rosters):
    """A change gives the bytes that the owner signed."""
    before, after = rosters
    signed = sign_document(OWNER, after)
    assert apply_change(before, roster_change(before, after, signed)) == signed


def test_unknown_history_names_the_newest():
    """Where nobody knows what was told it names the newest only."""
    after = roster_of(3, sequence=9)
    signed = sign_document(OWNER, after)
    strangers = (None, roster_of(2, sequence=10), roster_of(2, fleet="other"))
    for before in strangers:
        change = roster_change(before, after, signed)
        assert (change.after, change.sequence, change.members) == (9, 9, ())
        assert apply_change(after, change) == signed


@pytest.mark.slow
def test_one_more_device_is_a_short_message():
    """One more device is a short message in the largest fleet."""
    before = roster_of(limits.MAX_DEVICES - 1)
    after = roster_of(limits.MAX_DEVICES, sequence=6)
    signed = sign_document(OWNER, after)
    change = roster_change(before, after, signed)
    assert len(encode(change)) < 500 < len(signed) / 500
    assert apply_change(before, change) == signed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"after": 4}, "a change of roster 4"),
        ({"fleet": "other"}, "of 'other' on 5"),
        ({"places": (3,)}, "does not fit together"),
        ({"places": (0, 9)}, "a change of place 9 in a roster of 5"),
        ({"devices": 6}, "leaves places empty"),
        ({"members": (member(1), member(4))}, "a device twice"),
        ({"revoked_stay": 2}, "does not fit together"),
        ({"keys_since": 7}, "with keys of 7"),
    ],
)
def test_what_does_not_fit_is_refused(changes, reason):
    before = roster_of(3, revoked=("dev-1",))
    after = roster_of(5, sequence=6, revoked=("dev-1", "dev-2"))
    change = roster_change(before, after, sign_document(OWNER, after))
    with pytest.raises(WireError, match=reason):
        apply_change(before, dataclasses.replace(change, **changes))


def test_altered_change_fails_its_signature():
    """An aggregator that removes or adds entries produces a roster that the owner has not signed."""
    before, after = roster_of(3), roster_of(5, sequence=6)
    change = roster_change(before, after, sign_document(OWNER, after))
    altered = [
        {"members": (member(3), member(99))},
        {"revoked": ("dev-0",)},
        {"expires_at_s": 10**9},
        {"aggregator": member(99)},
        {"signature": sign_document(EVE, after)[:64]},
    ]
    for changes in altered:
        signed = apply_change(before, dataclasses.replace(change, **changes))
        with pytest.raises(UntrustedError):
            open_roster(signed, owner_key=OWNER.member.sign_key, fleet="reef", least_sequence=0, now_s=0)


def test_a_change_goes_forward():
    change = roster_change(None, roster_of(3), sign_document(OWNER, roster_of(3)))
    with pytest.raises(WireError, match="from roster 6 to 5"):
        dataclasses.replace(change, after=6)
    with pytest.raises(WireError, match="is over"):
        dataclasses.replace(change, devices=limits.MAX_DEVICES + 1)
