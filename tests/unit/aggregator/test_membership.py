"""Which runs an aggregator may serve with the roster and the keys that it has, and when it changes over to newer ones."""

import pytest

from aggregator import membership as aggregators
from edge_client import membership as enrolment
from shoal.errors import UntrustedError
from shoal.owner.keys.directory import FleetDirectory
from tests.helpers.plans import run_plan


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "demo", "mqtt://loopback")
    made.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    for name in ("dev-1", "dev-2"):
        made.add_device(enrolment.init(tmp_path / name, name).read_bytes())
    return made


@pytest.fixture
def server(fleet, tmp_path):
    card = (tmp_path / "server" / "aggregator.card").read_bytes()
    return aggregators.join(tmp_path / "server", fleet.add_aggregator(card).read_bytes(), fleet.fingerprint)


def signed_now(fleet, run=1):
    return run_plan(run=run, roster_sequence=fleet.roster.sequence)


def keys(fleet):
    return (fleet.path / "grants" / "aggregator.grant").read_bytes()


def test_a_run_of_the_roster_at_hand_is_served(fleet, server):
    assert server.reason(signed_now(fleet)) == ""


def test_a_run_under_a_newer_roster_waits_for_it(fleet, server):
    fleet.renew()
    run = signed_now(fleet)
    assert "signed under roster" in server.reason(run)
    server.adopt(fleet.roster_bytes)
    assert server.reason(run) == ""


def test_a_run_with_newer_keys_waits_for_them_and_puts_them_in_force(fleet, server):
    """Also where the roster has come already; a run of before is served with the keys of before, as long as it comes first."""
    old = signed_now(fleet)
    before = server.grant.broadcast_key
    fleet.revoke("dev-2")
    new = signed_now(fleet, run=2)
    server.adopt(fleet.roster_bytes)
    assert "newer keys" in server.reason(new)
    server.take_grant(keys(fleet))
    assert server.reason(old) == ""
    assert server.grant.broadcast_key == before
    assert server.reason(new) == ""
    assert server.grant.broadcast_key == fleet.secrets.broadcast_key != before
    assert server.group.secret == fleet.secrets.broadcast_key
    assert before not in b"".join(p.read_bytes() for p in server.directory.iterdir() if p.is_file())
    with pytest.raises(UntrustedError, match="replaced since"):
        server.reason(old)


def test_keys_say_which_roster_goes_with_them(fleet, server):
    """It comes by itself, and nobody works on under the older secrets until it has."""
    before = server.roster
    fleet.revoke("dev-2")
    server.take_grant(keys(fleet))
    assert server.roster == before
    assert server.keys_since == fleet.roster.keys_since > before.keys_since
    assert aggregators.AggregatorMembership(server.directory).next == server.next


def test_keys_for_a_device_are_not_the_aggregators(fleet, server):
    fleet.revoke("dev-2")
    with pytest.raises(UntrustedError):
        server.take_grant((fleet.path / "grants" / "dev-1.grant").read_bytes())
    assert server.next is None
