"""Signed rosters: the owner's newest one is accepted, and any other is refused with a reason."""

import dataclasses

import pytest

from crypto.seal.identity import Identity, sign_document
from shoal.errors import UntrustedError
from shoal.membership.roster import aggregator_of, open_roster
from shoal.protocol.documents import Roster
from tests.helpers.refusals import refused

OWNER, DEVICE, EVE = (Identity.generate(n) for n in ("owner", "dev-1", "eve"))
ROSTER = Roster(
    fleet="demo", sequence=5, issued_at_s=100, expires_at_s=200, aggregator=None, devices=(DEVICE.member,), revoked=()
)


def read(roster=ROSTER, signer=OWNER, **changes):
    arguments = {"owner_key": OWNER.member.sign_key, "fleet": "demo", "least_sequence": 5, "now_s": 150, **changes}
    return open_roster(sign_document(signer, roster), **arguments)


def test_the_owners_roster_is_read():
    assert read() == ROSTER
    assert read(now_s=200) == ROSTER, "the last second counts"
    assert read(least_sequence=4) == ROSTER


@pytest.mark.parametrize(
    ("arguments", "match", "hint"),
    [
        ({"signer": EVE}, "not its sender's", ""),
        ({"fleet": "other"}, "a roster of fleet 'demo', not 'other'", ""),
        ({"least_sequence": 6}, "refused as a rollback", ""),
        ({"now_s": 201}, "expired", "shoal-fleet renew"),
    ],
)
def test_other_rosters_are_refused(arguments, match, hint):
    with refused(UntrustedError, match, hint=hint):
        read(**arguments)


def test_fleet_without_an_aggregator_says_so():
    with pytest.raises(UntrustedError, match="no aggregator"):
        aggregator_of(ROSTER)
    assert aggregator_of(dataclasses.replace(ROSTER, aggregator=EVE.member)) == EVE.member
