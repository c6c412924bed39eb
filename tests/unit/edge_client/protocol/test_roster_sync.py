"""Requests for a whole roster: repeated until it arrives, but not for ever, even with a hostile aggregator."""

import dataclasses

import pytest

from edge_client.protocol.roster_sync import MOST_TRIES, WHOLE_AGAIN_S, RosterSync
from shoal.errors import UntrustedError
from shoal.membership.roster_delta import roster_change
from shoal.transport.loopback import LoopbackBroker, LoopbackTransport
from shoal.util.files import write_private
from tests.helpers.parties import TOPICS, Parties

DEVICE = "dev-1"
WHOLE = f"{TOPICS.roster}/#"


class Recording(LoopbackTransport):
    """A transport that records the topics of its subscriptions."""

    def __init__(self):
        super().__init__(LoopbackBroker(), DEVICE, lambda _event: None)
        self.asked = []

    def subscribe(self, topic_filter):
        self.asked.append(topic_filter)
        super().subscribe(topic_filter)


@pytest.fixture
def parties(tmp_path):
    return Parties(tmp_path, DEVICE)


@pytest.fixture
def transport():
    made = Recording()
    made.start()
    return made


@pytest.fixture
def feed(parties, transport):
    parties.members[DEVICE].adopt(parties.owner.roster_bytes)
    made = RosterSync(parties.members[DEVICE], transport, TOPICS)
    made.start()
    return made


def newest(parties):
    """Return the roster change that an aggregator announces which does not know the roster before."""
    return roster_change(None, parties.owner.roster, parties.owner.roster_bytes)


def test_requests_get_rarer_and_then_stop(parties, feed, transport, caplog):
    feed.on_change(dataclasses.replace(newest(parties), after=1 << 31, sequence=1 << 31), 0.0)
    for second in range(2 * 3600):
        feed.tick(float(second))
    assert transport.asked.count(WHOLE) == MOST_TRIES
    assert WHOLE not in transport.filters
    assert [r.getMessage() for r in caplog.records] == ["the whole roster did not arrive: giving up"]
    for _ in range(2):
        parties.owner.renew()
    feed.on_change(newest(parties), 8000.0)
    assert WHOLE in transport.filters
    feed.on_whole(parties.owner.roster_bytes)
    assert WHOLE not in transport.filters


def test_the_first_request_is_repeated_after_a_minute(parties, feed, transport):
    for _ in range(2):
        parties.owner.renew()
    feed.on_change(newest(parties), 0.0)
    feed.tick(WHOLE_AGAIN_S)
    assert transport.asked.count(WHOLE) == 1
    feed.tick(WHOLE_AGAIN_S + 1.0)
    assert transport.asked.count(WHOLE) == 2


def test_a_newer_roster_copied_by_hand_ends_the_requests(parties, feed, transport):
    before = parties.owner.roster
    parties.owner.renew()
    late, late_bytes = parties.owner.roster, parties.owner.roster_bytes
    parties.owner.renew()
    write_private(parties.members[DEVICE].directory / "roster.signed", parties.owner.roster_bytes)
    feed.on_change(roster_change(before, late, late_bytes), 0.0)
    assert parties.members[DEVICE].roster == parties.owner.roster
    assert WHOLE not in transport.filters
    parties.owner.renew()
    feed.on_change(dataclasses.replace(newest(parties), sequence=parties.owner.roster.sequence + 1), 0.0)
    assert WHOLE in transport.filters
    late_bytes = parties.owner.roster_bytes
    for _ in range(2):
        parties.owner.renew()
    write_private(parties.members[DEVICE].directory / "roster.signed", parties.owner.roster_bytes)
    with pytest.raises(UntrustedError, match="rollback"):
        feed.on_whole(late_bytes)
    assert WHOLE not in transport.filters


def test_newer_keys_may_open_a_whole_that_could_not_be_read(parties, feed, transport):
    for _ in range(2):
        parties.owner.renew()
    feed.look_again()
    assert WHOLE not in transport.asked
    feed.on_change(newest(parties), 0.0)
    transport.asked.clear()
    feed.look_again()
    assert set(transport.asked) == {f"{TOPICS.roster_change}/#", WHOLE}
